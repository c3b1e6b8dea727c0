"""Plain decoding against its lower bound: the time of reading the weights once.

The bound uses the memory bandwidth that a copy achieves, in bytes read and written.
"""

import functools
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.accelerator_parts.jobs import (
    Job,
    JobSettings,
    Row,
    random_decoder,
    random_prompts,
    seconds_of,
)
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation.token_cost import model_size

MODELS = ("blockwise_1b5", "llama_7b", "smollm2_135m")


def jobs(settings: JobSettings) -> Iterator[Job]:
    """The bandwidth, then each model at each batch size."""
    # So large that the launch of the copy takes no noticeable share of its time.
    size = 1 << (20 if settings.tiny else 32)
    # Measured once, and stored with every row.
    bandwidth = functools.cache(lambda: _copy_bandwidth(size))
    yield "copy", lambda: {"bytes": size, "bytes_per_second": bandwidth()}
    for name in MODELS[-1:] if settings.tiny else MODELS:
        decoder = functools.cache(
            lambda name=name: random_decoder(settings.model(name, heads=False))
        )
        for batch in settings.batch_sizes:
            yield (
                f"{name}, batch {batch}",
                lambda batch=batch, decoder=decoder: _plain(
                    settings, decoder(), batch, bandwidth()
                ),
            )


def _copy_bandwidth(size: int) -> float:
    """Bytes per second that the device reads and writes in a copy, best of 10.

    Args:
      size: bytes of the array; far more than the capacity of any cache.
    """
    array = jnp.zeros(size // 4, jnp.int32)
    # A plain copy would be removed by the compiler.
    copy = jax.jit(lambda x: x + 1)
    return 2 * array.nbytes / min(seconds_of(lambda: copy(array), 10))


def _plain(
    settings: JobSettings, decoder: Decoder, batch: int, bandwidth: float
) -> Row:
    """Milliseconds per serial call of a batch, without prefill."""
    config = decoder.model.config
    length, new_tokens = (8, 8) if settings.tiny else (128, 128)
    prompts = random_prompts(batch, length, config.trunk.vocab_size)
    options = DecodeOptions(max_new_tokens=new_tokens, batch_size=batch)
    task = decoder.task(GREEDY, options)
    times = []
    for number in range(settings.rounds + 1):
        state = task.prefill(prompts, range(batch), batch, new_tokens)
        jax.block_until_ready(state)
        start = time.perf_counter()
        jax.block_until_ready(task.run(state))
        if number:  # the first one compiles
            times.append(time.perf_counter() - start)
    bytes_per_value = 4 if settings.dtype == "float32" else 2
    read = model_size(config).trunk_parameters * bytes_per_value
    turn, floor = statistics.median(times) / new_tokens, read / bandwidth
    return {
        "dtype": settings.dtype,
        "prompt_tokens": length,
        "new_tokens": new_tokens,
        "weights_bytes": read,
        "bytes_per_second": bandwidth,
        "ms_per_call": 1e3 * turn,
        "ms_floor": 1e3 * floor,
        "times_floor": turn / floor,
        "tokens_per_second": batch / turn,
    }
