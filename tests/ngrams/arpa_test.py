"""Tests of bpd_jax.ngrams.arpa."""

import gzip
import pathlib

import numpy as np
import pytest

from bpd_jax.errors import UserError
from bpd_jax.ngrams.arpa import read_arpa, write_arpa
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.prune import prune

SMALL = """
\\data\\
ngram 1=4
ngram 2=3

\\1-grams:
-99\t<s>\t-0.2
-0.5\t</s>
-0.4\t0\t-0.1
-0.6\t1

\\2-grams:
-0.3\t<s> 0
-0.2\t0 1
-0.25\t0 </s>

\\end\\
"""


def same(left: NGramModel, right: NGramModel) -> bool:
    return all(
        len(ones) == len(others)
        and all(
            np.allclose(one, other, rtol=1e-6, atol=1e-6)
            for one, other in zip(ones, others, strict=True)
        )
        for ones, others in (
            (left.keys, right.keys),
            (left.log_probs, right.log_probs),
            (left.log_backoffs, right.log_backoffs),
        )
    )


@pytest.mark.parametrize("name", ["model.arpa", "model.arpa.gz"])
def test_a_model_comes_back_to_the_last_digit(
    trigrams: NGramModel, tmp_path: pathlib.Path, name: str
) -> None:
    for model in (trigrams, prune(trigrams, 40), prune(trigrams, trigrams.sizes[0])):
        write_arpa(model, tmp_path / name)
        again = read_arpa(tmp_path / name, vocab_size=10)
        assert same(model, again)
        other = tmp_path / f"again_{name}"
        write_arpa(again, other)
        assert other.read_bytes() == (tmp_path / name).read_bytes()


def test_gzip_files_do_not_depend_on_time_or_name(
    trigrams: NGramModel, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_arpa(trigrams, tmp_path / "one.gz")
    monkeypatch.setattr("time.time", lambda: 1.0)
    write_arpa(trigrams, tmp_path / "two.gz")
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()


def test_symbols_are_written_and_read(
    document_model: NGramModel, tmp_path: pathlib.Path
) -> None:
    symbols = [*"abcdefgh", "é", "<|endoftext|>"]
    path = tmp_path / "model.arpa"
    write_arpa(document_model, path, symbols)
    assert "\té\t" in path.read_text(encoding="utf-8")
    again = read_arpa(path, symbols=symbols, end_of_text=9)
    assert same(document_model, again)
    assert again.end_of_text == 9
    assert again.vocab_size == 10


@pytest.mark.parametrize(
    "symbols, message",
    [
        (["a"], "1 entries for 10 tokens"),
        ([*"abcdefghi", "j k"], "blank"),
        ([*"abcdefghi", ""], "blank"),
        ([*"abcdefghi", "a"], "equal"),
        ([*"abcdefghi", "<s>"], "<s>"),
    ],
)
def test_symbol_tables_that_do_not_fit_are_refused(
    trigrams: NGramModel, tmp_path: pathlib.Path, symbols: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        write_arpa(trigrams, tmp_path / "model.arpa", symbols)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(
    trigrams: NGramModel, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.arpa"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bpd_jax.ngrams.arpa._lines", fail)
    with pytest.raises(UserError, match="No space left"):
        write_arpa(trigrams, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_reading_what_others_write(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "small.arpa"
    path.write_text("made by hand\n" + SMALL.replace("\t", " "))
    model = read_arpa(path)
    assert model.vocab_size == 2
    assert model.sizes == (4, 3)
    assert model.log_prob([model.bos], 0) == pytest.approx(-0.3 * np.log(10))
    assert model.log_prob([model.bos], 1) == pytest.approx(-0.8 * np.log(10))
    assert model.log_prob([1], model.bos) == -np.inf


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("ngram 2=3", "ngram 2=4", r"line 17: 4 2-grams were announced"),
        ("ngram 2=3", "ngram 2=2", r"line 15: expected \\end"),
        ("ngram 1=4", "ngram 1=3", r"line 10: expected \\2-grams"),
        ("ngram 1=4", "ngram 1=5", r"line 12: 5 1-grams were announced"),
        ("ngram 2=3", "ngram 3=3", r"line 4: expected 'ngram 2='"),
        ("ngram 2=3", "ngram 2=x", r"line 4: the number of n-grams"),
        ("ngram 1=4", "ngram 1=0", r"no unigrams"),
        ("\\1-grams:", "\\one-grams:", r"line 6: expected \\1-grams"),
        ("\\2-grams:\n", "", r"line 12: expected \\2-grams"),
        ("\\end\\\n", "", r"cut short: it ends after line 16"),
        ("\\data\\\n", "", r"cut short"),
        ("-0.6\t1", "-0.6", r"line 10: this is no 1-gram: '-0.6'"),
        ("-0.2\t0 1", "-0.2\t0 1\t-0.5", r"line 14: this is no 2-gram"),
        ("-0.6\t1", "0.6\t1", r"line 10: the log-probability 0.6 is above 0"),
        ("-0.6\t1", "nan\t1", r"line 10: nan is no logarithm"),
        ("-0.6\t1", "x\t1", r"line 10: 'x' is no number"),
        ("-0.4\t0\t-0.1", "-0.4\t0\tinf", r"line 9: inf is no logarithm"),
        ("-0.4\t0\t-0.1", "-0.4\t0\t-inf", r"line 9: the back-off weight -inf"),
        ("-0.2\t0 1", "-0.2\t0 7", r"line 14: '7' is not a token"),
        ("-0.2\t0 1", "-0.2\t0 -1", r"line 14: '-1' is not a token"),
        ("-0.2\t0 1", "-0.2\t0 the", r"line 14: 'the' is not a token"),
        ("-0.6\t1", f"-0.6\t{10**30}", r"line 10: '1000"),
        ("-0.4\t0\t-0.1", "-0.4\t1\t-0.1", r"line 10: this 1-gram is there twice"),
        ("-0.2\t0 1", "-0.2\t0 </s>", r"line 15: this 2-gram is there twice"),
    ],
)
def test_a_faulty_file_is_refused_with_its_line(
    tmp_path: pathlib.Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "small.arpa"
    assert SMALL.count(old) == 1
    path.write_text(SMALL.replace(old, new))
    with pytest.raises(UserError, match=message) as caught:
        read_arpa(path)
    assert "small.arpa" in str(caught.value)


def test_an_ngram_without_its_prefix_or_suffix_is_refused(
    trigrams: NGramModel, tmp_path: pathlib.Path
) -> None:
    text = SMALL.replace("-0.6\t1\n", "").replace("1=4", "1=3")
    path = tmp_path / "small.arpa"
    path.write_text(text)
    with pytest.raises(UserError, match=r"line 13: this 2-gram's end"):
        read_arpa(path, vocab_size=2)
    path.write_text(text.replace("0 1", "1 0"))
    with pytest.raises(UserError, match=r"line 13: this 2-gram's beginning"):
        read_arpa(path, vocab_size=2)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "small.arpa"
    path.write_text(SMALL)
    with pytest.raises(UserError, match="line 10: '1' is not a token"):
        read_arpa(path, vocab_size=1)
    with pytest.raises(UserError, match="line 9: '0' is not a token"):
        read_arpa(path, symbols=["a", "b"])


def test_files_that_are_no_arpa_files_are_refused(
    trigrams: NGramModel, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_arpa(tmp_path / "missing.arpa")
    path = tmp_path / "model.arpa.gz"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match="line 1: this is not UTF-8"):
        read_arpa(path)
    path.write_text("text\n" * 2000)
    with pytest.raises(UserError, match="no ARPA file"):
        read_arpa(path)
    write_arpa(trigrams, path)
    data = path.read_bytes()
    for length in (len(data) - 1, len(data) // 2, 5):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=r"arpa\.gz is cut short"):
            read_arpa(path)
    path.write_bytes(data[:200] + b"\0\0\0\0" + data[204:])
    with pytest.raises(UserError, match=r"arpa\.gz"):
        read_arpa(path)
    path.write_bytes(gzip.compress(gzip.decompress(data)[:-8]))
    with pytest.raises(UserError, match="cut short"):
        read_arpa(path)
