"""Seconds of the passes and of the drafting of serial calls on this device."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.decode_loop import Weights, look
from bpd_jax.decoding.decode_state import DecodeState
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions, StepOptions
from bpd_jax.drafting.interface import without_arrays
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.cache import KVCache
from bpd_jax.models.device_ops import compiler_options
from bpd_jax.models.model import Model
from bpd_jax.models.partitioning import on_host
from bpd_jax.training import hosts

# Numbers of draft tokens whose passes are timed; others are interpolated.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_REPEATS = 7


@dataclasses.dataclass(frozen=True)
class PassCosts:
    """Seconds of one forward pass over M draft tokens in each of B rows.

    Attributes:
      seconds: seconds by M, increasing in M.
    """

    seconds: dict[int, float]

    def at(self, nodes: int) -> float:
        """Seconds of a pass over `nodes` tokens, linearly inter- or extrapolated."""
        sizes = sorted(self.seconds)
        if nodes in self.seconds or len(sizes) == 1:
            return self.seconds.get(nodes, self.seconds[sizes[0]])
        above = max(min(int(np.searchsorted(sizes, nodes)), len(sizes) - 1), 1)
        low, high = sizes[above - 1], sizes[above]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return self.seconds[low] + slope * (nodes - low)


def measure_passes(
    decoder: Decoder,
    batch_size: int,
    text_length: int,
    sizes: Sequence[int] = SIZES,
) -> PassCosts:
    """Times passes of the model over M draft tokens after a text.

    Args:
      batch_size: B; with a mesh, the result of `Task.rows`.
      text_length: number of tokens in the cache.
      sizes: values of M.
    """
    task = decoder.task(GREEDY, DecodeOptions(max_new_tokens=max(sizes)))
    text = [np.ones(text_length, np.int32)] * batch_size
    cache = task.prefill(text, range(batch_size), batch_size, 1).cache
    jit = _jit()
    runs: dict[int, Callable[[], object]] = {}
    for size in sizes:

        @jit
        def run(model: Model, cache: KVCache, size: int = size) -> jax.Array:
            tokens = jnp.ones((batch_size, size), jnp.int32)
            positions = text_length + jnp.broadcast_to(jnp.arange(size), tokens.shape)
            mask = causal_mask(jnp.ones_like(tokens))
            hidden, *_ = model.forward(tokens, positions, mask, cache)
            return model.greedy_tokens(hidden)

        runs[size] = functools.partial(run, decoder.model, cache)
    times = _median_seconds(runs)
    ascending = sorted(sizes)
    # Decreasing times are noise: a pass over more tokens is never faster.
    seconds = itertools.accumulate((times[size] for size in ascending), max)
    return PassCosts(dict(zip(ascending, seconds, strict=True)))


def measure_drafting(
    decoder: Decoder, method: Method, prompt: np.ndarray, batch_size: int
) -> float:
    """Seconds of drafting for one serial call of `batch_size` rows.

    A method with a price is timed without: outside the loop the gate would be copied.
    """
    search: Any = method.search
    if getattr(search, "price", None) is not None:
        search = dataclasses.replace(search, price=None)
        method = dataclasses.replace(method, search=search, text="")
    options = DecodeOptions(max_new_tokens=1, batch_size=batch_size)
    prompts, reference = [prompt] * batch_size, None
    if method.is_oracle:
        reference = decoder.decode(GREEDY, prompts, options)
    task = decoder.task(method, options, reference)
    drafter = task.drafter
    rows = task.rows(batch_size)
    state = task.prefill(prompts, range(batch_size), rows, 1)

    jit = _jit()

    @jit
    def draft_on_device(model: Model, weights: Weights, state: DecodeState) -> object:
        seen, memory, entropies = look(model, weights, drafter, state, StepOptions())
        return drafter.propose(seen, weights.drafter), memory, entropies

    # Compiled programs would keep the drafter's arrays as long as the process runs.
    static = without_arrays(drafter)
    jitted_look = jit(look, static_argnames=("drafter", "options"))

    def draft_on_host(model: Model, weights: Weights, state: DecodeState) -> object:
        seen = jitted_look(model, weights, static, state, StepOptions())[0]
        return drafter.propose(on_host(seen), None)

    draft = draft_on_device if drafter.on_device else draft_on_host
    run = functools.partial(draft, task.model, task.weights, state)
    return _median_seconds({0: run})[0]


def _jit() -> Callable[..., Any]:
    """`jax.jit` with the options of the programs of decoding, whose times count."""
    return functools.partial(jax.jit, compiler_options=compiler_options())


def _median_seconds(runs: dict[int, Callable[[], object]]) -> dict[int, float]:
    """Median seconds of each run; runs alternate, so that noise affects all alike."""
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[int, list[float]] = {key: [] for key in runs}
    for _ in range(_REPEATS):
        for key, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[key].append(time.perf_counter() - start)
    medians = {key: statistics.median(values) for key, values in times.items()}
    # The same numbers in all processes, which choose a method by them.
    return dict(zip(medians, hosts.agree([*medians.values()]), strict=True))
