"""Tests of `bpd_jax.ngrams.build_model`."""

import gzip
import math
import pathlib

import numpy as np
import pytest

from bpd_jax.data.tokenizer import train_bpe
from bpd_jax.errors import UserError
from bpd_jax.ngrams.build_model import (
    ARPA_FILE,
    FST_FILE,
    SYMBOLS_FILE,
    Settings,
    build,
)
from bpd_jax.ngrams.counting import bounded_memory, sources
from bpd_jax.ngrams.formats import fst_files
from bpd_jax.ngrams.formats.arpa import read_arpa
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.formats.symbols import read_symbols, write_symbols
from bpd_jax.ngrams.interpolate import interpolate
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.prune import prune


@pytest.fixture
def tokens(tmp_path: pathlib.Path, corpus: list[np.ndarray]) -> str:
    path = tmp_path / "ids.txt"
    path.write_text("\n".join(" ".join(map(str, line)) for line in corpus))
    return str(path)


def test_all_three_formats_contain_the_same_model(
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
    from_arpa = read_arpa(output / ARPA_FILE, vocab_size=10, end_of_text=9)
    for actual, expected in zip(model.log_probs, from_arpa.log_probs, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert (output / FST_FILE).read_bytes() == fst_files.fst_bytes(model)
    assert {path.name for path in report.written} >= {ARPA_FILE, FST_FILE}
    assert all(path.stat().st_size == size for path, size in report.written.items())
    lines = pathlib.Path(tokens).read_text().splitlines()
    sequences = [np.array(line.split(), int) for line in lines if line]
    assert report.sequences == len(sequences)
    assert report.tokens == sum(line.size for line in sequences)
    assert report.measure is not None
    assert report.measure.text == "training text"
    after, before = report.measure.model, report.measure.unpruned
    assert after.perplexity == pytest.approx(model.perplexity(sequences))
    assert before is not None
    assert before.events == after.events
    assert before.perplexity != after.perplexity


def test_perplexity_is_measured_on_held_out_tokens(
    tmp_path: pathlib.Path, tokens: str
) -> None:
    heldout = tmp_path / "heldout.txt"
    heldout.write_text("0 1 2\n3 9 1\n")
    settings = Settings(
        output=str(tmp_path / "model"),
        tokens=tokens,
        vocab_size=10,
        end_of_text=9,
        heldout_tokens=str(heldout),
    )
    report = build(settings)
    assert report.measure is not None
    assert report.measure.text == "held-out text"
    assert report.measure.unpruned is None
    # 9 is the end-of-text token.
    expected = NGramModel.load(tmp_path / "model").evaluate([[0, 1, 2], [3], [1]])
    assert report.measure.model.events == expected.events == 8
    assert report.measure.model.log_prob == pytest.approx(expected.log_prob)


def test_model_of_counts_equals_model_of_the_text(
    tmp_path: pathlib.Path, tokens: str
) -> None:
    common = {"min_counts": (1, 1, 2), "theta": 1e-4}
    source = {"tokens": tokens, "vocab_size": 10, "end_of_text": 9}
    build(Settings(str(tmp_path / "text"), order=3, **source, **common))
    bounded_memory.count_to_folder(
        sources.open_source(**source), tmp_path / "counts", order=4
    )
    # Orders above --order are omitted.
    report = build(
        Settings(
            str(tmp_path / "model"), counts=str(tmp_path / "counts"), order=3, **common
        )
    )
    assert report.measure is None
    assert report.tokens > 0
    for path in (tmp_path / "text").iterdir():
        assert path.read_bytes() == (tmp_path / "model" / path.name).read_bytes()
    with pytest.raises(UserError, match="states its"):
        build(
            Settings(
                str(tmp_path / "model"), counts=str(tmp_path / "counts"), vocab_size=10
            )
        )


def test_text_larger_than_memory_gives_the_same_model(
    tmp_path: pathlib.Path, tokens: str
) -> None:
    lines = pathlib.Path(tokens).read_text()
    pathlib.Path(tokens).write_text(f"{lines}\n" * 300)
    for name, memory in (("large", 4_000_000_000), ("small", 1_000_000)):
        build(Settings(str(tmp_path / name), tokens=tokens, order=3, memory=memory))
    for path in (tmp_path / "large").iterdir():
        assert path.read_bytes() == (tmp_path / "small" / path.name).read_bytes()
    # The work folder is removed.
    assert {path.name for path in tmp_path.iterdir()} == {"ids.txt", "large", "small"}


def test_models_are_converted_pruned_and_interpolated(
    tmp_path: pathlib.Path, tokens: str
) -> None:
    first, second = str(tmp_path / "one"), str(tmp_path / "two")
    ids = {"vocab_size": 10, "end_of_text": 9}
    build(Settings(first, tokens=tokens, order=3, **ids))
    build(Settings(second, tokens=tokens, order=2, max_ngrams=30, **ids))
    original = NGramModel.load(first)
    for name in ("", f"/{ARPA_FILE}", f"/{FST_FILE}"):
        output = str(tmp_path / "converted")
        build(Settings(output, model=(first + name,), **(ids if name else {})))
        model = NGramModel.load(output)
        assert model.sizes == original.sizes
        assert model.end_of_text == 9
        assert model.log_prob([0, 1], 2) == pytest.approx(
            original.log_prob([0, 1], 2), abs=1e-5
        )
    mixed = str(tmp_path / "mixed")
    report = build(Settings(mixed, model=(first, second), weight=0.7, max_ngrams=80))
    assert sum(report.pruned) <= 80 < sum(report.counted)
    expected = prune(interpolate(original, NGramModel.load(second), 0.7), 80)
    for actual, expected_log_probs in zip(
        NGramModel.load(mixed).log_probs, expected.log_probs, strict=True
    ):
        np.testing.assert_array_equal(actual, expected_log_probs)
    # A model may be replaced by its pruned version.
    build(Settings(first, model=(first,), max_per_order=(20, 10)))
    assert NGramModel.load(first).sizes[1] <= 20


def test_tokens_are_written_as_strings(tmp_path: pathlib.Path, tokens: str) -> None:
    names = [*"abcdefgh", "é", "<|endoftext|>"]
    write_symbols(names, tmp_path / "names.txt")
    output = tmp_path / "model"
    build(
        Settings(
            str(output),
            tokens=tokens,
            order=2,
            vocab_size=10,
            end_of_text=9,
            symbols=str(tmp_path / "names.txt"),
        )
    )
    assert read_symbols(output / SYMBOLS_FILE) == names
    model = NGramModel.load(output)
    for path in (output / ARPA_FILE, output / FST_FILE):
        loaded = load_model(path, symbols=names, end_of_text=9)
        assert loaded.sizes == model.sizes
    text = gzip.decompress((output / ARPA_FILE).read_bytes()).decode()
    assert "\té\t" in text
    # Reads strings with the symbol table and writes ids.
    with_ids = tmp_path / "plain"
    build(
        Settings(
            str(with_ids),
            model=(str(output / ARPA_FILE),),
            model_symbols=str(output / SYMBOLS_FILE),
            end_of_text=9,
        )
    )
    assert NGramModel.load(with_ids).sizes == model.sizes
    assert not (with_ids / SYMBOLS_FILE).exists()
    with pytest.raises(UserError, match=r"names\.txt has 10 entries for 12 tokens"):
        build(
            Settings(
                str(tmp_path / "other"),
                tokens=tokens,
                vocab_size=12,
                symbols=str(tmp_path / "names.txt"),
            )
        )
    assert not (tmp_path / "other").exists()


@pytest.fixture
def no_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes counting fail: errors must be raised before counting."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("counted first")

    monkeypatch.setattr(bounded_memory, "count", fail)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"symbols": "nofile"}, "cannot read nofile"),
        (
            {"symbols": "strings", "vocabulary": "{}/names.json"},
            "names.json has 257 entries for 10 tokens",
        ),
        ({"max_per_order": (9, 9, 9, 9)}, "has 4 numbers.* give at most 3"),
        ({"max_per_order": (9, 9), "order": 2}, "has 2 numbers.* give at most 1"),
        ({"heldout_tokens": "{}/b"}, "b has tokens up to 395, .* --vocab_size=396"),
        ({"heldout_tokens": "{}/empty"}, "held-out text .*empty has no documents"),
    ],
)
def test_invalid_settings_are_refused_before_counting(
    tmp_path: pathlib.Path, tokens: str, no_counting: None, arguments, message: str
) -> None:
    train_bpe(["some text"], 257).save(tmp_path / "names.json")
    (tmp_path / "b").write_text("0 395\n")
    (tmp_path / "empty").write_text("\n")
    arguments = {
        name: value.format(tmp_path) if isinstance(value, str) else value
        for name, value in arguments.items()
    }
    with pytest.raises(UserError, match=message):
        build(Settings(str(tmp_path / "x"), tokens=tokens, vocab_size=10, **arguments))


def test_empty_split_is_refused_before_counting(
    tmp_path: pathlib.Path, no_counting: None
) -> None:
    # None of these documents falls into the validation split of two percent.
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    vocabulary = tmp_path / "vocabulary"
    train_bpe(["some text"], 257).save(vocabulary / "tokenizer.json")
    with pytest.raises(UserError, match="validation split") as caught:
        build(
            Settings(
                str(tmp_path / "x"),
                text=str(tmp_path / "*.txt"),
                vocabulary=str(vocabulary),
                heldout_split="validation",
            )
        )
    assert "set validation_fraction" not in str(caught.value)
    assert "--heldout_text" in str(caught.value)


@pytest.mark.parametrize("output", ["/", ".", "..", "ids.txt/model"])
def test_invalid_outputs_are_refused(
    tmp_path: pathlib.Path,
    tokens: str,
    no_counting: None,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"not written to|cannot write"):
        build(Settings(output, tokens=tokens))


def test_settings_that_folders_state_are_refused(
    tmp_path: pathlib.Path, tokens: str
) -> None:
    model, counts = str(tmp_path / "model"), str(tmp_path / "counts")
    build(Settings(model, tokens=tokens, order=2))
    bounded_memory.count_to_folder(sources.open_source(tokens=tokens), counts, order=3)
    output = str(tmp_path / "x")
    for name in ("vocab_size", "end_of_text"):
        with pytest.raises(UserError, match=f"--{name} applies to ARPA and"):
            build(Settings(output, model=(model,), **{name: 20}))
    with pytest.raises(UserError, match=r"--order is 6, but .*counts has .* up to 3"):
        build(Settings(output, counts=counts, order=6))
    for source in ({"model": (model,)}, {"counts": counts}):
        with pytest.raises(UserError, match="--max_per_order has 3 numbers"):
            build(Settings(output, max_per_order=(9, 9, 9), **source))
    assert not pathlib.Path(output).exists()


def test_symbols_may_be_the_strings_of_the_vocabulary(tmp_path: pathlib.Path) -> None:
    for number in range(60):
        text = f"{number}: the cat sat on the mat.\n" * 5
        (tmp_path / f"{number}.txt").write_text(text)
    output = tmp_path / "model"
    build(
        Settings(
            str(output),
            text=str(tmp_path / "*.txt"),
            vocabulary="bpe:260",
            order=2,
            symbols="strings",
        )
    )
    names = read_symbols(output / SYMBOLS_FILE)
    assert len(names) == 260
    assert "\u2581" in names
    model = NGramModel.load(output)
    loaded = load_model(
        output / ARPA_FILE, symbols=names, end_of_text=model.end_of_text
    )
    assert loaded.sizes == model.sizes


def test_build_is_deterministic(tmp_path: pathlib.Path, tokens: str) -> None:
    for name in ("one", "two"):
        build(Settings(output=str(tmp_path / name), tokens=tokens, max_ngrams=60))
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        first, second = (tmp_path / folder / name for folder in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()


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


def test_existing_model_is_replaced_and_nothing_else(
    tmp_path: pathlib.Path, tokens: str
) -> None:
    output = tmp_path / "model"
    settings = Settings(output=str(output), tokens=tokens, order=2)
    build(settings)
    build(settings)
    other_folder = tmp_path / "precious"
    other_folder.mkdir()
    (other_folder / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis\.txt"):
        build(Settings(output=str(other_folder), tokens=tokens))
    assert (other_folder / "thesis.txt").exists()
    with pytest.raises(UserError, match="is a file"):
        build(Settings(output=tokens, tokens=tokens))


def test_failed_build_keeps_the_existing_model(
    tmp_path: pathlib.Path, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "model"
    build(Settings(output=str(output), tokens=tokens, order=2))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bpd_jax.ngrams.formats.arpa._Writer.blocks", fail)
    with pytest.raises(UserError, match="No space left"):
        build(Settings(output=str(output), tokens=tokens, order=3))
    assert NGramModel.load(output).order == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.txt", "model"]


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_file_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "ids.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=r"ids\.txt holds no text"):
        build(Settings(output=str(tmp_path / "model"), tokens=str(path)))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {},
            "--tokens, --generations, --counts and --model: found none",
        ),
        ({"task": "stdlib", "tokens": "x"}, "found --task and --tokens"),
        ({"tokens": "x", "order": 0}, "--order must be"),
        ({"tokens": "x", "order": 1_000_000}, "--order must be"),
        ({"tokens": "x", "min_counts": (1, 2)}, "--min_counts has 2 numbers"),
        ({"tokens": "x", "max_ngrams": 0}, "--max_ngrams must be"),
        ({"tokens": "x", "vocab_size": 0}, "--vocab_size must be"),
        ({"tokens": "x", "heldout_split": "validation"}, "--heldout_split applies"),
        ({"tokens": "x", "unseen_log_prob": -3.0}, "--unseen_log_prob must be"),
        ({"tokens": "x", "unseen_log_prob": math.nan}, "--unseen_log_prob must be"),
        ({"tokens": "x", "unseen_log_prob": -math.inf}, "--unseen_log_prob must be"),
        ({"tokens": "x", "bins": 0}, "--bins must be"),
        ({"tokens": "x", "bins": 10**12}, "--bins must be"),
        (
            {"text": "x", "heldout_text": "y", "vocabulary": "bpe:300"},
            "--vocabulary=bpe:300 is trained on the text",
        ),
        ({"text": "x", "vocab_size": 5}, "--vocab_size applies to --tokens"),
        ({"task": "x", "end_of_text": 5}, "--end_of_text applies to --tokens"),
        ({"tokens": "x", "theta": -1.0}, "--theta must be"),
        ({"tokens": "x", "weight": 0.5}, "--weight applies to --model only"),
        ({"model": ("a", "b")}, "--weight is the weight"),
        ({"model": ("a",), "weight": 0.5}, "--weight is the weight"),
        ({"model": ("a", "b", "c"), "weight": 0.5}, "--model takes one"),
        ({"model": ("a", ""), "weight": 0.5}, "--model takes one"),
        ({"model": ("a", "b"), "weight": 1.5}, "--weight must be"),
        ({"model": ("a",), "order": 3}, "--order applies to --task, --text, --tokens"),
        ({"model": ("a",), "counts": "x"}, "found --counts and --model"),
        (
            {"counts": "x", "split": "train"},
            "--split applies to --task, --text and --generations only",
        ),
        (
            {"tokens": "x", "heldout_text": "a", "heldout_tokens": "b"},
            "at most one of --heldout_split",
        ),
    ],
)
def test_invalid_settings_are_refused(arguments, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings(output="unused", **arguments)
