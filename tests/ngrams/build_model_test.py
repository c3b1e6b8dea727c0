import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data import generations
from bpd_jax.data.tokenizer import train_bpe
from bpd_jax.ngrams.build_model import ARPA_FILE, FST_FILE, SYMBOLS_FILE, build
from bpd_jax.ngrams.build_settings import BuildSettings
from bpd_jax.ngrams.counting import bounded_memory, sources
from bpd_jax.ngrams.evaluation import evaluate
from bpd_jax.ngrams.formats.arpa_reader import read_arpa
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.formats.openfst import automaton_of, encode
from bpd_jax.ngrams.formats.symbols import read_symbols, write_symbols
from bpd_jax.ngrams.model import NGramModel
from tests.ngrams.helpers import assert_same, same_folders

IDS = {"vocab_size": 10, "end_of_text": 9}
ROUNDED = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture
def tokens(tmp_path, corpus):
    path = tmp_path / "ids.txt"
    path.write_text("\n".join(" ".join(map(str, line)) for line in corpus))
    return str(path)


def make(output, **settings):
    return build(BuildSettings(str(output), **settings))


def test_all_three_formats_contain_the_same_model(tmp_path, tokens, corpus):
    output = tmp_path / "model"
    limits = {"order": 3, "min_counts": (1, 1, 2), "max_ngrams": 60}
    report = make(output, tokens=tokens, **limits, **IDS)
    model = NGramModel.load(output)
    assert model.sizes == report.pruned
    assert sum(report.pruned) <= 60 < sum(report.kept) < sum(report.counted)
    assert model.end_of_text == 9
    assert_same(read_arpa(output / ARPA_FILE, **IDS), model, **ROUNDED)
    assert (output / FST_FILE).read_bytes() == encode(automaton_of(model))
    assert {path.name for path in report.written} >= {ARPA_FILE, FST_FILE}
    sequences = [line for line in corpus if line.size]
    assert report.sequences == len(sequences)
    assert report.tokens == sum(line.size for line in sequences)
    assert report.measure.text == "training text"
    after, before = report.measure.model, report.measure.unpruned
    expected = evaluate([model], sequences)[0].perplexity
    assert after.perplexity == pytest.approx(expected)
    assert before.events == after.events
    assert before.perplexity != after.perplexity


def test_perplexity_is_measured_on_held_out_tokens(tmp_path, tokens):
    heldout = tmp_path / "heldout.txt"
    heldout.write_text("0 1 2\n3 9 1\n")
    output = tmp_path / "model"
    report = make(output, tokens=tokens, heldout_tokens=str(heldout), **IDS)
    assert report.measure.text == "held-out text"
    assert report.measure.unpruned is None
    # 9 is the end-of-text token.
    (expected,) = evaluate([NGramModel.load(output)], [[0, 1, 2], [3], [1]])
    assert report.measure.model.events == expected.events == 8
    assert report.measure.model.log_prob == pytest.approx(expected.log_prob)


def test_held_out_text_has_the_vocabulary_of_the_generated_texts(tmp_path):
    folder, heldout = tmp_path / "texts", tmp_path / "heldout.txt"
    tokenizer = train_bpe(["some text"], 257)
    generations.write_header(folder, base="abc", vocab_size=257, facts={})
    generations.write_shard(folder, 0, [np.array(tokenizer.encode("some text"))], [1])
    tokenizer.save(folder / "tokenizer.json")
    heldout.write_text("some text")
    options = {"split": "all", "heldout_text": str(heldout)}
    report = make(tmp_path / "model", generations=str(folder), **options)
    assert report.measure.model.events == len(tokenizer.encode("some text")) + 1
    assert report.measure.model.unknown == 0


def test_model_of_counts_equals_model_of_the_text(tmp_path, tokens):
    common = {"order": 3, "min_counts": (1, 1, 2), "theta": 1e-4}
    make(tmp_path / "text", tokens=tokens, **IDS, **common)
    counts = str(tmp_path / "counts")
    source = sources.open_source(tokens=tokens, **IDS)
    bounded_memory.count_to_folder(source, counts, order=4)
    # Orders above --order are omitted.
    report = make(tmp_path / "model", counts=counts, **common)
    assert report.measure is None
    assert report.tokens > 0
    assert same_folders(tmp_path / "text", tmp_path / "model")


def test_tokens_are_written_as_strings(tmp_path, tokens):
    names = [*"abcdefgh", "é", "<|endoftext|>"]
    table, output = tmp_path / "names.txt", tmp_path / "model"
    write_symbols(names, table)
    make(output, tokens=tokens, order=2, symbols=str(table), **IDS)
    assert read_symbols(output / SYMBOLS_FILE) == names
    model = NGramModel.load(output)
    path = output / ARPA_FILE
    assert_same(load_model(path, symbols=names, end_of_text=9), model, **ROUNDED)
    # Reads strings with the symbol table and writes ids.
    make(
        tmp_path / "plain",
        model=str(path),
        model_symbols=str(output / SYMBOLS_FILE),
        end_of_text=9,
    )
    assert_same(NGramModel.load(tmp_path / "plain"), model, **ROUNDED)
    assert not (tmp_path / "plain" / SYMBOLS_FILE).exists()


def test_symbols_may_be_the_strings_of_the_vocabulary(tmp_path):
    for number in range(60):
        text = f"{number}: the cat sat on the mat.\n" * 5
        (tmp_path / f"{number}.txt").write_text(text)
    output = tmp_path / "model"
    text = {"text": str(tmp_path / "*.txt"), "vocabulary": "bpe:260"}
    make(output, order=2, symbols="strings", **text)
    names = read_symbols(output / SYMBOLS_FILE)
    assert len(names) == 260
    assert "\u2581" in names
    model = NGramModel.load(output)
    path, end = output / ARPA_FILE, model.end_of_text
    assert_same(load_model(path, symbols=names, end_of_text=end), model, **ROUNDED)


def test_models_are_converted_and_pruned(tmp_path, tokens):
    folder = tmp_path / "one"
    make(folder, tokens=tokens, order=3, **IDS)
    original = NGramModel.load(folder)
    for name in ("", ARPA_FILE):
        make(tmp_path / "x", model=str(folder / name), **(IDS if name else {}))
        model = NGramModel.load(tmp_path / "x")
        assert_same(model, original, **ROUNDED)
        assert model.end_of_text == 9
    # A model may be replaced by its pruned version.
    make(folder, model=str(folder), max_per_order=(20, 10))
    assert NGramModel.load(folder).sizes[1] <= 20


@pytest.fixture
def no_counting(monkeypatch):
    """Makes counting fail: errors must be raised before counting."""

    def fail(*_, **__):
        raise AssertionError("counted first")

    monkeypatch.setattr(bounded_memory, "count", fail)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"symbols": "{}/table"}, "table has 1 entries for 10 tokens"),
        ({"max_per_order": (9, 9, 9, 9)}, "has 4 numbers.* give at most 3"),
        ({"heldout_tokens": "{}/b"}, "b has tokens up to 395, .* --vocab_size=396"),
        ({"heldout_tokens": "{}/empty"}, "held-out text .*empty has no documents"),
    ],
)
def test_invalid_settings_are_refused_before_counting(
    tmp_path, tokens, no_counting, arguments, message
):
    write_symbols(["a"], tmp_path / "table")
    (tmp_path / "b").write_text("0 395\n")
    (tmp_path / "empty").write_text("\n")
    arguments = {
        name: value.format(tmp_path) if isinstance(value, str) else value
        for name, value in arguments.items()
    }
    with pytest.raises(UserError, match=message):
        make(tmp_path / "x", tokens=tokens, vocab_size=10, **arguments)


def test_empty_split_is_refused_before_counting(tmp_path, no_counting):
    # None of these documents falls into the validation split of two percent.
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    train_bpe(["some text"], 257).save(tmp_path / "vocabulary" / "tokenizer.json")
    text = {"text": str(tmp_path / "*.txt"), "vocabulary": f"{tmp_path}/vocabulary"}
    with pytest.raises(UserError, match=r"validation split.*--heldout_text"):
        make(tmp_path / "x", heldout_split="validation", **text)


def test_settings_that_folders_state_are_refused(tmp_path, tokens):
    model, counts = str(tmp_path / "model"), str(tmp_path / "counts")
    make(tmp_path / "model", tokens=tokens, order=2)
    bounded_memory.count_to_folder(sources.open_source(tokens=tokens), counts, order=3)
    output = tmp_path / "x"
    for settings, message in (
        ({"model": model, "vocab_size": 20}, "--vocab_size applies to ARPA"),
        ({"counts": counts, "end_of_text": 20}, "--end_of_text applies to --tokens"),
        ({"counts": counts, "order": 6}, "--order is 6, but .*counts has .* up to 3"),
        ({"counts": counts, "max_per_order": (9, 9, 9)}, "--max_per_order has 3 num"),
    ):
        with pytest.raises(UserError, match=message):
            make(output, **settings)
    assert not output.exists()


def test_missing_models_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no .*missing"):
        load_model(tmp_path / "missing")
    with pytest.raises(UserError, match="an n-gram model"):
        load_model(tmp_path)
    (tmp_path / "model.fst").touch()
    with pytest.raises(UserError, match=r"model.fst is an automaton.*its ARPA file"):
        load_model(tmp_path / "model.fst")


def test_unseen_tokens_are_added_after_pruning(tmp_path, tokens):
    added = {"vocab_size": 20, "unseen_log_prob": -1000}
    make(tmp_path / "model", tokens=tokens, max_ngrams=40, **added)
    model = NGramModel.load(tmp_path / "model")
    assert model.log_prob([], 19) == -1000
    assert read_arpa(tmp_path / "model" / ARPA_FILE).vocab_size == 20


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "--tokens, --generations, --counts and --model: found none"),
        ({"task": "stdlib", "tokens": "x"}, "found --task and --tokens"),
        ({"tokens": "x", "min_counts": (1, 2)}, "--min_counts has 2 numbers"),
        ({"tokens": "x", "min_counts": (2, 2, 2, 2)}, "--min_counts must begin with 1"),
        ({"tokens": "x", "memory": 10}, "--memory must be a number of bytes.*1MB"),
        ({"tokens": "x", "heldout_split": "validation"}, "--heldout_split applies"),
        ({"model": "a", "order": 3}, "--order applies to --task, --text, --gen"),
        ({"counts": "x", "split": "train"}, "--split applies to --task, --text and"),
        ({"text": "x", "heldout_text": "y", "vocabulary": "bpe:9"}, "is trained on"),
        ({"tokens": "x", "heldout_text": "a", "heldout_tokens": "b"}, "at most one"),
    ],
)
def test_invalid_settings_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        BuildSettings(output="unused", **arguments)
