"""The price of a call: its time with drafts, in calls without.

The gate of the default method (`drafting.gate`) compares it with the tokens that drafts
yield. It depends on the model, its layout and the machine, so it is measured once for
them, in about a second, and kept where compiled programs are. From then on the calls
of a text depend on no clock.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base import progress, provenance
from bpd_jax.base.compiled import digest, processor, read_kept, write_kept
from bpd_jax.decoding.decode_state import DecodeState
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import Task, compile_task
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.gate import GatedDrafter
from bpd_jax.models.partitioning import on_host
from bpd_jax.training import hosts

# Rounds in which calls of both kinds are timed in turn, and calls of each. A gate that
# tries drafts again waits longer.
_ROUNDS, _CALLS = 7, 6

# A price that no call pays: drafting ends after the first one.
_NEVER = 1e6

# Those of this process, by their keys.
_prices: dict[bytes, float] = {}


def with_measured_price(
    decoder: Decoder,
    method: Method,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
) -> Method:
    """The method with the price of its calls here; one without a price unchanged.

    Args:
      prompts: the first batch of them is decoded to measure the price, with programs
        that decoding them needs anyway. If it ends too early, the method is unchanged.
    """
    task = decoder.prepare(method, prompts, options)
    if not isinstance(task.drafter, GatedDrafter) or not prompts:
        return method
    key = _key(task, method, min(options.batch_size, len(prompts)))
    price = hosts.agree(hosts.first(lambda: _prices.get(key) or _kept(key)))
    if price is None:
        price = _measured(task, prompts)
        if price is None:
            return method
        hosts.first(lambda: _keep(key, price))
    _prices[key] = price
    return method.with_setting("price", price)


def _measured(task: Task, prompts: Sequence[np.ndarray]) -> float | None:
    """The ratio of the shortest times, to a twentieth; None if texts end too early."""
    rows = min(task.options.batch_size, len(prompts))
    prompts = prompts[:rows]
    compile_task(task, prompts)
    # The price is an argument of the programs, which both tasks share.
    gate: Any = task.drafter
    always, plain = (
        dataclasses.replace(task, drafter=dataclasses.replace(gate, price=price))
        for price in (1.0, _NEVER)
    )
    state = task.prefill(
        prompts, range(rows), task.rows(rows), task.options.max_new_tokens
    )
    times = []
    for each in (always, plain) * _ROUNDS:
        seconds = _seconds(each, state)
        if seconds is None:
            return None
        times.append(seconds)
    # Other programs make calls longer, never shorter.
    drafted, single = min(times[::2]), min(times[1::2])
    return max(round(20 * hosts.agree(float(drafted / single))) / 20, 1.0)


def _seconds(task: Task, state: DecodeState) -> float | None:
    """Seconds of a call after the first one of a state; None if there is none."""
    # A run takes the memory of its state.
    state = jax.block_until_ready(task.run(jax.tree.map(jnp.copy, state), 1))
    before = on_host(state.calls).max()
    start = time.perf_counter()
    state = jax.block_until_ready(task.run(state, _CALLS))
    seconds = time.perf_counter() - start
    calls = on_host(state.calls).max() - before
    return seconds / calls if calls else None


def _key(task: Task, method: Method, rows: int) -> bytes:
    """A digest of all that the time of a call depends on."""
    arrays = jax.tree_util.tree_flatten_with_path((task.model, task.weights))[0]
    shapes = [f"{jax.tree_util.keystr(at)} {x.dtype}{x.shape}" for at, x in arrays]
    facts = (
        *(repr(task.model.config), method.without("price").composed, str(rows)),
        *(processor(), provenance.device(), repr(provenance.versions())),
        str(task.options.verification),
    )
    return digest([fact.encode() for fact in (*facts, *shapes)])


def _kept(key: bytes) -> float | None:
    content = read_kept("price", [key])
    return None if content is None else float(content)


def _keep(key: bytes, price: float) -> None:
    write_kept("price", [key], str(price).encode())
    progress.say(
        f"a call with drafts takes {price:.2f} times as long as one without here: "
        "measured once, and kept with the compiled programs.",
        sys.stderr,
    )
