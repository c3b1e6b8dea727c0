import pytest

from bpd_jax.base.errors import UserError, library_errors


class PanicException(BaseException):
    """The exception that libraries written in Rust raise."""


@pytest.mark.parametrize("error", [Exception, ValueError, PanicException])
def test_library_errors_become_user_errors(error):
    with pytest.raises(UserError, match=r"x\.json is damaged: reason"):
        _fail(error)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, UserError])
def test_interrupts_and_user_errors_are_not_converted(error):
    with pytest.raises(error, match=r"^reason$"):
        _fail(error)


def _fail(error: type[BaseException]) -> None:
    with library_errors("x.json is damaged"):
        raise error("reason")
