"""`bpd_jax.count_ngrams` as a command."""

import pathlib

import pytest

from bpd_jax.ngrams.counting.counts import NGramCounts, count_ngrams
from tests.commands import Done, assert_all_refused, call, python

SEQUENCES = [[0, 1, 2, 0, 1], [1, 2, 0, 1, 2]] * 5


def run(folder: pathlib.Path, *flags: str) -> Done:
    return call("bpd_jax.count_ngrams", *flags, folder=folder)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, part in (("a.txt", SEQUENCES[:4]), ("b.txt", SEQUENCES[4:])):
        lines = [" ".join(map(str, line)) for line in part]
        (tmp_path / name).write_text("\n".join(lines))
    return tmp_path


def test_token_files_to_counts(folder: pathlib.Path) -> None:
    arguments = ["--tokens=*.txt", "--order=3", "--min_counts=1,1,6", "--memory=1MB"]
    result = run(folder, *arguments, "--output=counts")
    assert result.returncode == 0, result.stderr
    assert "50 tokens in 10 sequences" in result.stdout
    assert "after min counts" in result.stdout
    counts = NGramCounts.load(folder / "counts")
    expected = count_ngrams(SEQUENCES, order=3)
    assert counts.seen == expected.sizes
    assert counts.sizes[:2] == expected.sizes[:2]
    assert counts.sizes[2] == (expected.counts[2] >= 6).sum() > 0


@pytest.mark.exhaustive
def test_beam_workers_give_the_same_counts(folder: pathlib.Path) -> None:
    pytest.importorskip("apache_beam")
    assert run(folder, "--tokens=*.txt", "--output=one").returncode == 0
    result = python(
        *("-m", "bpd_jax.count_ngrams", "--tokens=*.txt"),
        *("--output=beam", "--beam_runner=DirectRunner"),
        "--beam_options=--direct_num_workers=2 --direct_running_mode=multi_processing",
        folder=folder,
    )
    assert result.returncode == 0, result.stderr
    for path in (folder / "one").iterdir():
        assert path.read_bytes() == (folder / "beam" / path.name).read_bytes()


def test_invalid_flags_are_refused(folder: pathlib.Path) -> None:
    cases = [
        (["--tokens=a.txt"], "error: --output is missing"),
        (["--output=x"], "--tokens and --generations: found none"),
        (["--output=x", "--generations=a", "--max_bytes=2"], "--max_bytes applies"),
        (["--output=x", "--tokens=a.txt", "--task=b"], "found --task and --tokens"),
        (["--output=x", "--tokens=a.txt", "--min_counts=1,b"], "--min_counts must be"),
        (["--output=x", "--tokens=a.txt", "--memory=4XB"], "--memory must be"),
        (["--output=x", "--text=a", "--vocab_size=2"], "--vocab_size applies"),
        (["--output=x", "--tokens=a.txt", "--vocab_size=2"], "holds the token 2"),
        (["--output=x", "--tokens=a.txt", "--beam_options=--a"], "--beam_runner"),
        (["--output=x", "--tokens=a.txt", "--min_counts=1,1,1,1,2"], "has 5 numbers"),
    ]
    assert_all_refused("bpd_jax.count_ngrams", cases, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "b.txt"]
