"""Kernels are compiled where nothing can be kept, too."""

import numba
import pytest

from bpd_jax.ngrams.numba_kernels import njit


def test_kernels_are_compiled_without_a_place_for_a_cache(monkeypatch):
    def refuse(*signature, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available")
        return numba_njit(*signature, **options)

    numba_njit = numba.njit
    monkeypatch.setattr(numba, "njit", refuse)
    assert njit("int64(int64)")(lambda x: x + 1)(1) == 2
    monkeypatch.setattr(numba, "njit", lambda *_, **__: pytest.fail("another error"))
    with pytest.raises(pytest.fail.Exception):
        njit()(abs)
