"""Names of tokens in ARPA files and automata.

A symbol table is a list of V distinct non-empty strings without blanks. Files have
OpenFst's format: a name and a label per line. The label of a token is its id plus 1,
because label 0 is epsilon, whatever its name (`<epsilon>`, `<eps>`, `-`). Only tabs,
spaces and ends of lines separate fields, here as in ARPA files: a name may contain any
other character.
"""

import os
import re
from collections.abc import Iterable, Sequence

from bpd_jax.base import reading
from bpd_jax.base.errors import UserError
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path

EPSILON = "<epsilon>"
BOUNDARIES = ("</s>", "<s>")
UNKNOWN = ("<unk>", "<UNK>")

_SEPARATOR = re.compile("[ \t\r\n]+")
_BLANK = "\u2581"  # SentencePiece's symbol for a blank.


def check_symbols(vocab_size: int, symbols: Sequence[str]) -> None:
    """Checks that a table names all tokens."""
    if len(symbols) != vocab_size:
        raise UserError(
            f"the symbol table has {len(symbols)} entries for {vocab_size} tokens."
        )
    if any(not name or _SEPARATOR.search(name) for name in symbols):
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
    """Reads a table that `write_symbols`, OpenFst or Kaldi wrote.

    Its lines may be in any order. As in Kaldi's words.txt, `<s>` and `</s>` may be
    among the names; they are boundaries in ARPA files nevertheless.
    """
    path = as_path(path)
    try:
        with path.open("rb") as stream:
            lines = [
                reading.without_mark(line).decode("utf-8")
                for line in reading.bounded_lines(stream, path, kept=True)
            ]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a symbol table: it is not UTF-8.") from error
    names: dict[int, str] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip(" \t\r\n")
        if not text:
            continue
        name, *labels = _SEPARATOR.split(text)
        if len(labels) != 1 or not re.fullmatch("[0-9]{1,18}", labels[0]):
            raise UserError(
                f"{path}, line {number}: expected a name and a label, found {text!r}."
            )
        if int(labels[0]) in names:
            raise UserError(
                f"{path}, line {number}: the label {labels[0]} is repeated."
            )
        names[int(labels[0])] = name
    missing = next((n for n in range(len(names)) if n not in names), None)
    if not names or missing is not None:
        raise UserError(
            f"{path} has no name of the label {missing or 0}: labels are 0 (epsilon), "
            "1, 2, …, one for each token."
        )
    if len(set(names.values())) != len(names):
        raise UserError(f"two symbols of {path} are equal.")
    return [names[label] for label in range(1, len(names))]
