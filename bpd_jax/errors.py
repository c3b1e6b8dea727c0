"""The one exception that a user is meant to read."""

import contextlib
import re
from collections.abc import Iterator

# What a message quotes of a value or a list that is longer.
_LONGEST_WORD = 200
_LONGEST_MESSAGE = 1500


class UserError(Exception):
    """Bad input: one sentence that names the file or parameter and what to do.

    Library code raises it for anything a user can put right. The entry points
    (`bpd_jax.cli`) print it as `error: <sentence>` and exit with status 1; every
    other exception keeps its traceback, because it is a bug of ours.
    """

    def __str__(self) -> str:
        """The sentence; very long values in it are cut in the middle."""
        return shortened(super().__str__())


def shortened(text: str) -> str:
    """The text without the middle of very long words, and of itself if it is long."""
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

    Such libraries (tokenizers) raise a bare Exception for every fault of their input,
    and a BaseException, `pyo3_runtime.PanicException`, for a fault of their own.

    Args:
      sentence: begins the message; the library's follows.
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
