"""How numba compiles the kernels of n-grams; only other files of kernels import it."""

from collections.abc import Callable
from typing import Any

import numba


def njit(signature: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a function for several threads, and keeps the code if there is a place.

    The places are the folder of the source and the user's cache. numba raises an error
    if it can write to neither: in a read-only installation without a home folder.

    Args:
      signature: types, to compile at once; None to compile at the first call.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, cache=True, nogil=True)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            return numba.njit(signature, nogil=True)(function)

    return compiled
