"""The clock of programs."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.cpu import host


@pytest.mark.usefixtures("instructions")
@pytest.mark.instructions("avx2")
def test_the_clock_is_read_in_every_iteration_of_a_loop():
    @jax.jit
    def run(matrix):
        def step(matrix, _):
            matrix = jnp.tanh(matrix @ matrix)
            return matrix, host.microseconds(matrix)

        return jax.lax.scan(step, matrix, length=20)[1]

    matrix = jnp.full((300, 300), 1e-3)
    jax.block_until_ready(run(matrix))
    before = time.monotonic()
    times = np.asarray(jax.block_until_ready(run(matrix))).astype(np.int64)
    after = time.monotonic()
    taken = np.diff(times) % 2**32
    assert (taken > 0).all()
    assert taken.sum() < 1e6 * (after - before)
    assert abs(times[0] - 1e6 * before % 2**32) < 1e6 * (after - before) + 1


@pytest.mark.usefixtures("instructions")
@pytest.mark.instructions("no kernels")
def test_other_processors_have_none():
    assert host.microseconds(jnp.zeros(1)) is None
