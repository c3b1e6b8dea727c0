"""A small model with random parameters and a trigram model, bound in a decoder."""

import numpy as np
import pytest

from bpd_jax.decoding.generate import Generation
from tests.decoding.random_models import make_prompts, make_small_decoder


@pytest.fixture(scope="session")
def prompts():
    return make_prompts([5, 9, 3], seed=3)


@pytest.fixture(scope="session")
def decoder():
    return make_small_decoder()


@pytest.fixture(scope="session")
def make_generation():
    """Makes a decoded text; by default one of plain decoding."""

    def make(output=(), calls=1, **fields):
        plain = {
            "input_ids": np.array([1, 2]),
            "output_ids": np.array(output, int),
            "serial_calls": calls,
            "seconds": 0.5,
            "drafts": np.zeros((calls, 1), int),
            "accepted": np.ones(calls, int),
            "ranks": np.zeros(calls, int),
            "proposed": np.zeros((calls, 1), int),
            "nodes": np.ones(calls, int),
            "entropies": np.full((calls, 1), np.nan),
        }
        return Generation(**{**plain, **fields})

    return make
