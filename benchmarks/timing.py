"""Clocks that the benchmarks share."""

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


def seconds_of(run: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of every one of `rounds` runs, after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return times


def milliseconds(run: Callable[[], object], rounds: int) -> float:
    """Median milliseconds of a run."""
    return 1e3 * statistics.median(seconds_of(run, rounds))


def read_bandwidth() -> float:
    """Bytes per second at which a CPU reads a large array of weights, best of 10."""
    matrix = jnp.ones((65536, 1024))
    vector = jnp.ones(1024)
    product = jax.jit(jnp.dot)
    return matrix.nbytes / min(seconds_of(lambda: product(matrix, vector), 10))


def copy_bandwidth(size: int, rounds: int = 10) -> float:
    """Bytes per second that a device reads and writes while it copies, best of all.

    Args:
      size: bytes of the array; far more than any cache holds.
      rounds: copies.
    """
    array = jnp.zeros(size // 4, jnp.int32)
    # A plain copy would be removed by the compiler.
    copy = jax.jit(lambda x: x + 1)
    return 2 * array.nbytes / min(seconds_of(lambda: copy(array), rounds))


def first_line(error: Exception) -> str:
    """The first line of an error, for a table."""
    lines: Sequence[str] = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]
