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
        (b"<epsilon>\t0\nb\t2\n", "no name of the label 1"),
        (b"<epsilon>\t0\nb\t1\nc\t1\n", "line 3: the label 1 is repeated"),
        (b"<epsilon>\t0\nb\t-1\n", "line 2: expected"),
        (b"<epsilon>\t0\na\t1\na\t2\n", "equal"),
        (b"", "no name of the label 0"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_are_not_symbol_tables_are_refused(tmp_path, content, message):
    path = tmp_path / "symbols.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_symbols(path)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("-\t0\r\na\t1\r\n", ["a"]),
        ("b\t2\na\t1\n<eps>\t0\n\n", ["a", "b"]),
        ("<eps> 0\na 1\n#0 2\n<s> 3\n</s> 4\n", ["a", "#0", "<s>", "</s>"]),
        ("<eps> 0\na\u00a0b 1\n\u2028 2\n\x0b 3\n", ["a\u00a0b", "\u2028", "\x0b"]),
    ],
)
def test_tables_of_other_programs_are_read(tmp_path, content, names):
    path = tmp_path / "words.txt"
    path.write_bytes(content.encode())
    assert read_symbols(path) == names
