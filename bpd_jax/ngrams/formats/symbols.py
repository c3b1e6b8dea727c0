"""Names of tokens in ARPA files and automata.

A symbol table is a list of V distinct non-empty strings without blanks. Files have
OpenFst's format: a name and a label per line. The label of a token is its id plus 1,
because label 0 is `<epsilon>`.
"""

import os
from collections.abc import Iterable, Sequence

from bpd_jax.base.errors import UserError
from bpd_jax.storage import files
from bpd_jax.storage.buckets import as_path

EPSILON = "<epsilon>"
BOUNDARIES = ("</s>", "<s>")
UNKNOWN = ("<unk>", "<UNK>")

_BLANK = "\u2581"  # SentencePiece's symbol for a blank.


def check_symbols(vocab_size: int, symbols: Sequence[str]) -> None:
    """Checks that a table names all tokens.

    Raises:
      UserError: a name is missing, empty, duplicate, reserved or contains a blank.
    """
    if len(symbols) != vocab_size:
        raise UserError(
            f"the symbol table has {len(symbols)} entries for {vocab_size} tokens."
        )
    if any(name.split() != [name] for name in symbols):
        raise UserError("a symbol of the table is empty or has a blank in it.")
    reserved = {EPSILON, *BOUNDARIES}
    if len(set(symbols)) != len(symbols) or not reserved.isdisjoint(symbols):
        raise UserError(
            f"two symbols of the table are equal, or one is {', '.join(reserved)}."
        )


def printable_symbols(pieces: Iterable[str]) -> list[str]:
    r"""Returns a symbol table of the texts of tokens.

    A blank becomes U+2581, and any other character that is white space or not printable
    becomes `\uNNNN`. The token's id is appended to a text that is empty, reserved or a
    duplicate, as in `<s>#50256`.
    """
    used = {EPSILON, *BOUNDARIES, *UNKNOWN, ""}
    names = []
    for token, piece in enumerate(pieces):
        name = "".join(map(_printable, piece))
        if name in used:
            name += f"#{token}"
        while name in used:
            name += "#"
        used.add(name)
        names.append(name)
    return names


def _printable(character: str) -> str:
    if character == " ":
        return _BLANK
    if character.isprintable() and not character.isspace():
        return character
    return f"\\u{ord(character):04x}"


def write_symbols(symbols: Sequence[str], path: str | os.PathLike[str]) -> None:
    """Writes a table in OpenFst's text format."""
    lines = [f"{name}\t{label}\n" for label, name in enumerate([EPSILON, *symbols])]
    files.write_text(path, "".join(lines))


def read_symbols(path: str | os.PathLike[str]) -> list[str]:
    """Reads a table that `write_symbols` or OpenFst wrote.

    Raises:
      UserError: the file is missing or is not a symbol table.
    """
    path = as_path(path)
    try:
        with path.open("rb") as stream:
            lines = [
                line.decode("utf-8")
                for line in files.bounded_lines(stream, path, kept=True)
            ]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a symbol table: it is not UTF-8.") from error
    names: list[str] = []
    for number, line in enumerate(lines):
        fields = line.split()
        if len(fields) != 2 or fields[1] != str(number):
            raise UserError(
                f"{path}, line {number + 1}: expected a name and the label {number}, "
                f"found {line.strip()!r}."
            )
        names.append(fields[0])
    if not names or names[0] != EPSILON:
        raise UserError(f"{path} does not begin with {EPSILON} and the label 0.")
    check_symbols(len(names) - 1, names[1:])
    return names[1:]
