import codecs
import dataclasses
import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting.token_files import highest_id
from bpd_jax.ngrams.formats.arpa import format_numbers, write_arpa
from bpd_jax.ngrams.formats.arpa_reader import read_arpa
from bpd_jax.ngrams.prune import prune
from tests.ngrams.helpers import assert_same

# Files have seven digits.
ROUNDED = {"rtol": 1e-6, "atol": 1e-6}

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


def read_text(tmp_path, text, **arguments):
    path = tmp_path / "small.arpa"
    path.write_text(text, encoding="utf-8")
    return read_arpa(path, **arguments)


@pytest.mark.parametrize("name", ["model.arpa", "model.arpa.gz"])
def test_models_round_trip(trigrams, tmp_path, monkeypatch, name):
    for model in (trigrams, prune(trigrams, 40), prune(trigrams, trigrams.sizes[0])):
        write_arpa(model, tmp_path / name)
        read = read_arpa(tmp_path / name, vocab_size=10)
        assert_same(read, model, **ROUNDED)
        # Equal models give equal bytes, whatever the time and the name of the file.
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda: 1.0)
            write_arpa(read, tmp_path / f"again_{name}")
        copy = (tmp_path / f"again_{name}").read_bytes()
        assert copy == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("name", ["log_probs", "log_backoffs"])
def test_models_with_nan_are_not_written(trigrams, tmp_path, name):
    first, *other_orders = getattr(trigrams, name)
    first = np.where(np.arange(first.size) == 1, np.nan, first)
    model = dataclasses.replace(trigrams, **{name: (first, *other_orders)})
    with pytest.raises(UserError, match="of the 1-grams is not finite"):
        write_arpa(model, tmp_path / "model.arpa")
    assert not list(tmp_path.iterdir())


def test_files_of_other_programs_are_read(tmp_path):
    text = SMALL.replace("\t", " ").replace("ngram 1=", "ngram\t1 =\t")
    # The probability of <s> is ignored.
    text = text.replace("-99 <s>", "0 <s>").replace("\n-0.2 0 1", "\r\n  -0.2 0 1  ")
    model = read_text(tmp_path, "made by hand\n" + text)
    assert model.vocab_size == 2
    assert model.sizes == (4, 3)
    assert model.log_prob([model.bos], 0) == pytest.approx(-0.3 * np.log(10))
    assert model.log_prob([model.bos], 1) == pytest.approx(-0.8 * np.log(10))
    assert model.log_prob([1], model.bos) == -np.inf


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("ngram 2=3", "ngram 2=4", r"line 17: 4 2-grams were announced"),
        ("ngram 1=4", "ngram 1=3", r"line 10: expected \\2-grams"),
        ("ngram 1=4", "ngram 1=0", r"no unigrams"),
        ("ngram 2=3", "ngram\x0c2=3", r"line 4: expected \\1-grams:"),
        ("\\end\\\n", "", r"truncated: it ends after line 16"),
        ("-0.6\t1", "-0.6", r"line 10: this is not a 1-gram: '-0.6'"),
        ("-0.2\t0 1", "-0.2\t0 1\t-0.5", r"line 14: the back-off weight '-0.5'"),
        ("-0.6\t1", "0.6\t1", r"line 10: the log-probability '0.6' is above 0"),
        ("-0.6\t1", "nan\t1", r"line 10: 'nan' is not a logarithm"),
        ("-0.2\t0 1", "-0.2\t0 7", r"line 14: a token is outside 0 ... 1"),
        ("-0.6\t1", f"-0.6\t{10**9}", r"small\.arpa.*1000000000, is more than"),
        ("-0.6\t1", "-0.6\t" + "9" * 5000, r"line 10: '9+ … 9+' is not a token"),
        ("-0.2\t0 1", "-0.2\t0 <s>", r"line 14: <s> must be the first"),
        ("-0.4\t0\t-0.1", "-0.4\t1\t-0.1", r"line 10: this 1-gram is listed twice"),
    ],
)
def test_error_names_the_invalid_line(tmp_path, old, new, message):
    assert SMALL.count(old) == 1
    with pytest.raises(UserError, match=message) as caught:
        read_text(tmp_path, SMALL.replace(old, new))
    assert "small.arpa" in str(caught.value)


def test_ngram_without_its_prefix_or_suffix_is_refused(tmp_path):
    text = SMALL.replace("-0.6\t1\n", "").replace("1=4", "1=3")
    with pytest.raises(UserError, match=r"line 13: the suffix of this 2-gram"):
        read_text(tmp_path, text, vocab_size=2)
    with pytest.raises(UserError, match=r"line 13: the prefix of this 2-gram"):
        read_text(tmp_path, text.replace("0 1", "1 0"), vocab_size=2)


def test_files_that_are_not_arpa_are_refused(trigrams, tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_arpa(tmp_path / "missing.arpa")
    path = tmp_path / "model.arpa.gz"
    for text in (b"text\n", b"\xff\xfe\n"):
        path.write_bytes(text * 2000)
        with pytest.raises(UserError, match="not an ARPA file"):
            read_arpa(path)
    write_arpa(trigrams, path)
    data = path.read_bytes()
    short = gzip.compress(gzip.decompress(data)[:-8])
    damaged = data[:200] + b"\0\0\0\0" + data[204:]
    for content, message in (
        (data[:-1], r"arpa\.gz is truncated"),
        (data[:5], r"arpa\.gz is truncated"),
        (short, "truncated"),
        (damaged, r"arpa\.gz"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_arpa(path)


def test_ngrams_of_unknown_words_are_dropped(tmp_path):
    text = (
        SMALL.replace("1=4", "1=5")
        .replace("2=3", "2=5")
        .replace("-0.6\t1\n", "-0.6\t1\n-1.5\t<unk>\t-0.3\n")
        .replace("-0.2\t0 1\n", "-0.2\t0 1\n-0.9\t0 <unk>\n-0.7\t<unk> 0\n")
    )
    assert_same(read_text(tmp_path, text), read_text(tmp_path, SMALL))


def test_symbol_table_may_contain_unk(trigrams, tmp_path):
    text = SMALL.replace("\t0", "\t<unk>").replace(" 0", " <unk>")
    model = read_text(tmp_path, text, symbols=["<unk>", "1"])
    assert_same(model, read_text(tmp_path, SMALL))
    with pytest.raises(UserError, match="'1' is not in the symbol table"):
        read_text(tmp_path, text, symbols=["<unk>", "2"])
    for symbols, message in (
        (["a"], "1 entries for 10 tokens"),
        ([*"abcdefghi", "j k"], "blank"),
        ([*"abcdefghi", "<s>"], "<s>"),
    ):
        with pytest.raises(UserError, match=message):
            write_arpa(trigrams, tmp_path / "model.arpa", symbols)


def test_only_ascii_blanks_separate_names(tmp_path):
    names = ["a\x0b", "b\x0c\u00a0"]
    text = SMALL.replace("0 1", " ".join(names)).replace(" 0", f" {names[0]}")
    text = text.replace("\t0", f"\t{names[0]}").replace("-0.6\t1", f"-0.6\t{names[1]}")
    assert_same(read_text(tmp_path, text, symbols=names), read_text(tmp_path, SMALL))


def test_missing_and_infinite_weights_are_read(tmp_path):
    text = SMALL.replace("-0.4\t0\t-0.1", "-0.4\t0").replace("-0.6\t1", "-inf\t1")
    model = read_text(tmp_path, text)
    assert model.log_prob([1], 0) == model.log_prob([], 0)
    assert model.log_prob([], 1) == -np.inf
    never = read_text(tmp_path, SMALL.replace("\t0\t-0.1", "\t0\t-inf"))
    assert never.log_backoffs[0][0] == -99


def test_numbers_of_many_digits_are_read_exactly(tmp_path):
    # Python parses numbers of seventeen digits or with exponents.
    number = "-0.30102999566398120"
    for text in (number, "-3.010299956639812e-1", "-30102999566398120E-17"):
        model = read_text(tmp_path, SMALL.replace("-0.3\t<s> 0", f"{text}\t<s> 0"))
        assert model.log_prob([model.bos], 0) == float(number) * np.log(10)


PRUNED_SUFFIX = """\\data\\
ngram 1=5
ngram 2=2
ngram 3=1
ngram 4=1

\\1-grams:
-0.6\t0\t-0.1
-0.6\t1\t-0.2
-0.6\t2\t-0.3
-0.6\t</s>
-99\t<s>\t-0.4

\\2-grams:
-0.1\t<s> 0\t-0.05
-0.15\t0 1\t-0.06

\\3-grams:
-0.25\t<s> 0 1\t-0.07

\\4-grams:
-0.3\t<s> 0 1 2
\\end\\
"""


def test_pruned_suffixes_are_added_without_changing_scores(tmp_path):
    # `a b c` and then `b c` are missing.
    model = read_text(tmp_path, PRUNED_SUFFIX)
    assert model.sizes == (5, 3, 2, 1)
    a, b, c, bos = 0, 1, 2, model.bos
    expected = {
        (bos, a, b, c): -0.3,
        (a, b, c): -0.06 - 0.2 - 0.6,
        (b, c): -0.2 - 0.6,
        (bos, a, b, a): -0.07 - 0.06 - 0.2 - 0.6,
        (a, b, c, a): -0.3 - 0.6,
        (b, c, b): -0.3 - 0.6,
    }
    for gram, score in expected.items():
        log_prob = model.log_prob(list(gram[:-1]), gram[-1])
        assert log_prob == pytest.approx(score * np.log(10))


def test_model_does_not_depend_on_the_block_size(trigrams, tmp_path, monkeypatch):
    path = tmp_path / "model.arpa"
    write_arpa(trigrams, path)
    monkeypatch.setattr("bpd_jax.ngrams.counting.token_files._BLOCK", 37)
    monkeypatch.setattr("bpd_jax.ngrams.formats.arpa_reader._ROWS", 3)
    assert_same(read_arpa(path, vocab_size=10), trigrams, **ROUNDED)
    lines = path.read_text().splitlines()
    invalid_line = lines.index("\\3-grams:") + 5
    lines[invalid_line - 1] = "x x " + lines[invalid_line - 1]
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=f"line {invalid_line}: this is not a 3-gram"):
        read_arpa(path, vocab_size=10)


def test_lines_of_an_order_may_be_in_any_order(trigrams, tmp_path):
    path = tmp_path / "model.arpa"
    write_arpa(trigrams, path)
    sections = path.read_text().split("\n\n")
    rng = np.random.default_rng(8)
    for index, section in enumerate(sections):
        title, *lines = section.split("\n")
        if title.endswith("-grams:"):
            sections[index] = "\n".join([title, *rng.permutation(lines)])
    model = read_text(tmp_path, "\n\n".join(sections), vocab_size=10)
    assert_same(model, trigrams, **ROUNDED)


def test_missing_middle_order_is_refused(tmp_path):
    text = PRUNED_SUFFIX.replace("2=2", "2=0").replace(
        "-0.1\t<s> 0\t-0.05\n-0.15\t0 1\t-0.06\n", ""
    )
    with pytest.raises(UserError, match="longer n-grams, but no 2-grams"):
        read_text(tmp_path, text)


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "ids.txt").write_bytes(codecs.BOM_UTF8 + b"1 2\n")
    assert highest_id(tmp_path / "ids.txt") == 2
    text = SMALL.lstrip()
    assert_same(read_text(tmp_path, "\ufeff" + text), read_text(tmp_path, text))


@pytest.mark.parametrize("score, weight", [("-1e300", "1e300"), ("-3e38", "1e-300")])
def test_numbers_of_any_magnitude_are_restored(tmp_path, score, weight):
    text = SMALL.replace("-0.2\n", f"{weight}\n").replace("-0.6\t", f"{score}\t")
    model = read_text(tmp_path, text)
    assert model.log_probs[0][1] == float(score) * np.log(10)
    assert model.log_backoffs[0][3] == float(weight) * np.log(10)
    copy = tmp_path / "again.arpa"
    write_arpa(model, copy)
    assert_same(read_arpa(copy), model, **ROUNDED)


def formatted(value):
    letters, begins = format_numbers(np.array([value]))
    assert begins.tolist() == [0, letters.size]
    return letters.tobytes().decode()


@given(st.floats(-99, 10))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_numbers_are_written_to_seven_digits(value):
    text = formatted(value)
    assert float(text) == pytest.approx(value, rel=5.001e-7, abs=1e-12)
    # Formatting is idempotent.
    assert formatted(float(text)) == text
