"""Errors that a user can correct, and warnings."""

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator

# Maximum length of quoted values and lists in a message.
_LONGEST_WORD = 200
_LONGEST_MESSAGE = 1500


class UserError(Exception):
    """Bad input: one sentence that names the file or parameter and what to do.

    Library code raises it for anything that a user can correct. The commands
    (`bpd_jax.base.cli`) print it as `error: <sentence>` and exit with status 1; every
    other exception is a bug and keeps its traceback.
    """

    def __str__(self) -> str:
        """The sentence, with very long values shortened in the middle."""
        return shortened(super().__str__())


@functools.cache
def warn(sentence: str) -> None:
    """Prints a warning on standard error; the same sentence once per process."""
    print(f"warning: {shortened(sentence)}", file=sys.stderr, flush=True)


def shortened(text: str) -> str:
    """Shortens very long words of a text, and the text itself, in the middle."""
    longest = rf"\S{{{_LONGEST_WORD + 1},}}"
    text = re.sub(longest, lambda word: _cut(word[0], _LONGEST_WORD), text)
    return _cut(text, _LONGEST_MESSAGE)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most * 3 // 4]} … {text[-most // 5 :]}"


@contextlib.contextmanager
def library_errors(sentence: str) -> Iterator[None]:
    """Turns every exception of a library written in Rust into a `UserError`.

    Such libraries (tokenizers) raise a bare Exception for all invalid input, and a
    BaseException, `pyo3_runtime.PanicException`, for internal errors.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise
        raise UserError(f"{sentence}: {error}.") from error


@contextlib.contextmanager
def naming(source: str | os.PathLike[str]) -> Iterator[None]:
    """Context that adds a file or folder to messages that do not name it."""
    try:
        yield
    except UserError as error:
        if str(source) in str(error):
            raise
        raise UserError(f"{source}: {error}") from error
