import pytest

from bpd_jax.errors import UserError, library_errors


class PanicException(BaseException):
    """As libraries written in Rust raise it."""


@pytest.mark.parametrize("error", [Exception, ValueError, PanicException])
def test_faults_of_libraries_are_told(error):
    with pytest.raises(UserError, match=r"x\.json is damaged: reason"):
        _fail(error)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, UserError])
def test_what_is_no_fault_of_the_library_passes(error):
    with pytest.raises(error, match=r"^reason$"):
        _fail(error)


def _fail(error: type[BaseException]) -> None:
    with library_errors("x.json is damaged"):
        raise error("reason")
