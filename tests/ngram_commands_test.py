"""The commands `bpd_jax.count_ngrams` and `bpd_jax.build_ngram`."""

import pathlib

import pytest

from bpd_jax.ngrams.counting.counts import NGramCounts, count_ngrams
from bpd_jax.ngrams.evaluation import evaluate
from bpd_jax.ngrams.model import NGramModel
from tests.commands import assert_all_refused, python, succeed

SEQUENCES = [[0, 1, 2, 0, 1], [1, 2, 0, 1, 2]] * 5


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, part in (("a.txt", SEQUENCES[:4]), ("b.txt", SEQUENCES[4:])):
        lines = [" ".join(map(str, line)) for line in part]
        (tmp_path / name).write_text("\n".join(lines))
    return tmp_path


def test_token_files_to_counts(folder: pathlib.Path) -> None:
    flags = ["--order=3", "--min_counts=1,1,6", "--memory=1MB", "--output=counts"]
    result = succeed("bpd_jax.count_ngrams", "--tokens=*.txt", *flags, folder=folder)
    assert "after min counts" in result.stdout
    counts = NGramCounts.load(folder / "counts")
    expected = count_ngrams(SEQUENCES, order=3)
    assert counts.seen == expected.sizes
    assert counts.sizes[:2] == expected.sizes[:2]
    assert counts.sizes[2] == (expected.counts[2] >= 6).sum() > 0


def test_token_files_to_model(folder: pathlib.Path) -> None:
    flags = ["--min_counts=1,1,2", "--vocab_size=5", "--end_of_text=4", "--bins=3"]
    arguments = ["--tokens=*.txt", "--order=3", *flags, "--output=model"]
    result = succeed("bpd_jax.build_ngram", *arguments, folder=folder)
    assert "50 tokens in 10 sequences" in result.stdout
    assert (folder / "model" / "model.arpa.gz").is_file()
    model = NGramModel.load(folder / "model")
    assert (model.order, model.end_of_text) == (3, 4)
    perplexity = evaluate([model], SEQUENCES)[0].perplexity
    assert f"perplexity, training text: {perplexity:.2f}" in result.stdout


@pytest.mark.exhaustive
def test_beam_workers_give_the_same_counts(folder: pathlib.Path) -> None:
    pytest.importorskip("apache_beam")
    beam = (
        "--beam_options=--direct_num_workers=2 --direct_running_mode=multi_processing"
    )
    for flags in (
        ["--output=one"],
        ["--output=beam", "--beam_runner=DirectRunner", beam],
    ):
        arguments = ["-m", "bpd_jax.count_ngrams", "--tokens=*.txt", *flags]
        result = python(*arguments, folder=folder)
        assert result.returncode == 0, result.stderr
    for path in (folder / "one").iterdir():
        assert path.read_bytes() == (folder / "beam" / path.name).read_bytes()


def test_invalid_flags_are_refused(folder: pathlib.Path) -> None:
    output, tokens = "--output=x", "--tokens=a.txt"
    cases = [
        ([tokens], "error: --output is missing"),
        ([output], "--tokens and --generations: found none"),
        ([output, tokens, "--min_counts=1,b"], "--min_counts must be"),
        ([output, tokens, "--memory=4XB"], "--memory must be"),
        ([output, tokens, "--beam_options=--a"], "--beam_runner"),
    ]
    assert_all_refused("bpd_jax.count_ngrams", cases, folder)
    cases = [
        ([output, tokens, "--split"], "split"),
        ([output, tokens, "--max_per_order=5,b"], "--max_per_order must be"),
        ([output, "--model=missing"], "error: there is no missing"),
    ]
    assert_all_refused("bpd_jax.build_ngram", cases, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "b.txt"]
