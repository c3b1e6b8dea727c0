"""Tests of bpd_jax.ngrams.build."""

import pathlib

import numpy as np
import pytest

from bpd_jax.errors import UserError
from bpd_jax.ngrams import fst
from bpd_jax.ngrams.arpa import read_arpa
from bpd_jax.ngrams.build import ARPA_FILE, FST_FILE, Settings, build
from bpd_jax.ngrams.model import NGramModel


@pytest.fixture
def tokens(tmp_path: pathlib.Path, corpus: list[np.ndarray]) -> str:
    path = tmp_path / "ids.txt"
    path.write_text("\n".join(" ".join(map(str, line)) for line in corpus))
    return str(path)


def test_the_three_forms_hold_the_same_model(
    tmp_path: pathlib.Path, tokens: str
) -> None:
    output = tmp_path / "model"
    report = build(
        Settings(
            output=str(output),
            tokens=tokens,
            order=3,
            min_counts=(1, 1, 2),
            max_ngrams=60,
            vocab_size=10,
            end_of_text=9,
        )
    )
    model = NGramModel.load(output)
    assert model.sizes == report.pruned
    assert sum(report.pruned) <= 60 < sum(report.kept) < sum(report.counted)
    assert model.end_of_text == 9
    again = read_arpa(output / ARPA_FILE, vocab_size=10, end_of_text=9)
    for ours, theirs in zip(model.log_probs, again.log_probs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    automaton = fst.read_fst(output / FST_FILE)
    assert automaton.num_states() == fst.build_fst(model).num_states()
    assert {path.name for path in report.written} >= {ARPA_FILE, FST_FILE}
    assert all(path.stat().st_size == size for path, size in report.written.items())
    lines = pathlib.Path(tokens).read_text().splitlines()
    sequences = [np.array(line.split(), int) for line in lines if line]
    assert report.sequences == len(sequences)
    assert report.tokens == sum(line.size for line in sequences)
    assert report.train is not None
    assert report.train.perplexity == pytest.approx(model.perplexity(sequences))


def test_the_same_input_gives_the_same_bytes(
    tmp_path: pathlib.Path, tokens: str
) -> None:
    for name in ("one", "two"):
        build(Settings(output=str(tmp_path / name), tokens=tokens, max_ngrams=60))
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        one, two = (tmp_path / folder / name for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_unseen_tokens_are_added_after_pruning(
    tmp_path: pathlib.Path, tokens: str
) -> None:
    settings = Settings(
        output=str(tmp_path / "model"),
        tokens=tokens,
        vocab_size=20,
        max_ngrams=40,
        unseen_log_prob=-1000,
    )
    build(settings)
    model = NGramModel.load(tmp_path / "model")
    assert model.log_prob([], 19) == -1000
    assert read_arpa(tmp_path / "model" / ARPA_FILE).vocab_size == 20


def test_an_older_model_is_replaced_and_nothing_else(
    tmp_path: pathlib.Path, tokens: str
) -> None:
    output = tmp_path / "model"
    settings = Settings(output=str(output), tokens=tokens, order=2)
    build(settings)
    build(settings)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds other files"):
        build(Settings(output=str(precious), tokens=tokens))
    assert (precious / "thesis.txt").exists()
    with pytest.raises(UserError, match="is a file"):
        build(Settings(output=tokens, tokens=tokens))


def test_a_failed_build_leaves_the_older_model(
    tmp_path: pathlib.Path, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "model"
    build(Settings(output=str(output), tokens=tokens, order=2))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bpd_jax.ngrams.arpa._write", fail)
    with pytest.raises(UserError, match="No space left"):
        build(Settings(output=str(output), tokens=tokens, order=3))
    assert NGramModel.load(output).order == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.txt", "model"]


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "ids.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=r"ids\.txt holds no text"):
        build(Settings(output=str(tmp_path / "model"), tokens=str(path)))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "exactly one of --task, --text and --tokens: found none"),
        ({"task": "stdlib", "tokens": "x"}, "found --task and --tokens"),
        ({"tokens": "x", "order": 0}, "--order is 0"),
        ({"tokens": "x", "min_counts": (1, 2)}, "--min_counts has 2 numbers"),
        ({"tokens": "x", "max_ngrams": 0}, "--max_ngrams is 0"),
        ({"tokens": "x", "vocab_size": 0}, "--vocab_size is 0"),
        ({"tokens": "x", "heldout_split": "validation"}, "--heldout_split goes"),
        ({"tokens": "x", "unseen_log_prob": -3.0}, "--unseen_log_prob is -3"),
        ({"text": "x", "vocab_size": 5}, "--vocab_size goes with --tokens"),
        ({"task": "x", "end_of_text": 5}, "--end_of_text goes with --tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(arguments, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings(output="unused", **arguments)
