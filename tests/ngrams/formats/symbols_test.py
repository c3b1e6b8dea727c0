"""Tests of bpd_jax.ngrams.formats.symbols."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.formats.symbols import (
    check_symbols,
    printable_symbols,
    read_symbols,
    write_symbols,
)


def test_symbols_are_printable_forms_of_texts():
    pieces = ["a", " the", "\n", "\t x", "", "<s>", "</s>", "é", r"\xc3", "a", "a#9"]
    assert printable_symbols(pieces) == [
        "a",
        "\u2581the",
        r"\u000a",
        "\\u0009\u2581x",
        "#4",
        "<s>#5",
        "</s>#6",
        "é",
        r"\xc3",
        "a#9",
        "a#9#10",
    ]


@given(st.lists(st.text(st.sampled_from("ab \n#<s>\u2581\u00a0\u3000"), max_size=3)))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_texts_give_a_valid_table(pieces):
    names = printable_symbols(pieces)
    check_symbols(len(pieces), names)
    assert names == printable_symbols(pieces)


def test_written_table_is_read(tmp_path):
    pynini = pytest.importorskip("pynini")
    names = ["a", "\u2581b", "é"]
    path = tmp_path / "symbols.txt"
    write_symbols(names, path)
    assert path.read_text(encoding="utf-8").startswith("<epsilon>\t0\na\t1\n")
    assert read_symbols(path) == names
    table = pynini.SymbolTable.read_text(str(path))
    assert [table.find(label) for label in (1, 2, 3)] == names


@pytest.mark.parametrize(
    "content, message",
    [
        (b"a\t0\nb\t1\n", "does not begin with <epsilon>"),
        (b"<epsilon>\t0\nb\t2\n", "line 2: expected a name and the label 1"),
        (b"<epsilon>\t0\nb c\t1\n", "line 2: expected"),
        (b"<epsilon>\t0\na\t1\na\t2\n", "equal"),
        (b"", "does not begin"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_are_not_symbol_tables_are_refused(tmp_path, content, message):
    path = tmp_path / "symbols.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_symbols(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_symbols(tmp_path / "missing.txt")
