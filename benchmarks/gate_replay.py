"""The gate of drafts replayed on decoded texts, at any time of a call."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.drafting.gate import GatedDrafter, GateMemory
from bpd_jax.drafting.interface import Outcome, Prompts


def speeds(texts: list[tuple[str, np.ndarray]], price: float) -> dict[str, Any]:
    """Speeds over plain decoding at one price.

    `texts` are pairs of the name of a prompts file and, int32 [tokens], the tokens that
    a call at each position yields; `price` is the time of a call with drafts in calls
    without.
    """
    gate = GatedDrafter(_NothingToLearn(), price)
    tokens: dict[str, int] = {}
    times: dict[str, float] = {}
    always = best = 0.0
    for name, accepted in texts:
        drafts = price * _calls(accepted)
        always, best = always + drafts, best + min(drafts, len(accepted))
        tokens[name] = tokens.get(name, 0) + len(accepted)
        times[name] = times.get(name, 0.0) + _gated_time(gate, accepted)
    total = sum(tokens.values())
    return {
        "gate": total / sum(times.values()),
        "always": total / always,
        "best_for_each_text": total / best,
        "gate_by_prompts_file": {name: tokens[name] / times[name] for name in times},
    }


def _calls(accepted: np.ndarray) -> int:
    """Calls with drafts alone."""
    place = calls = 0
    while place < len(accepted):
        place, calls = place + int(accepted[place]), calls + 1
    return calls


def _gated_time(gate: GatedDrafter, accepted: np.ndarray) -> float:
    """The time of a text with the gate, in calls without drafts."""
    row = jnp.zeros((1, 1), jnp.int32)
    nothing = jnp.zeros((1, 1, 0))
    memory = gate.start(gate.arrays, Prompts(row, row[0], nothing, nothing))
    # Texts of all lengths share a program.
    padded = np.zeros(-len(accepted) % 128 + len(accepted), np.int32)
    padded[: len(accepted)] = accepted
    drafted, plain = _decode(gate, gate.arrays, memory, padded, len(accepted))
    return float(drafted) * gate.price + float(plain)


@functools.partial(jax.jit, static_argnums=0)
def _decode(
    gate: GatedDrafter,
    arrays: Any,
    memory: GateMemory,
    accepted: jax.Array,
    length: int,
) -> tuple[jax.Array, jax.Array]:
    """The calls of a text with and without drafts."""

    def call(carry: Any) -> Any:
        memory, place, drafted, plain = carry
        opens = memory.opens.all()
        count = jnp.where(opens, jnp.minimum(accepted[place], length - place), 1)
        nothing: Any = None
        features = jnp.zeros((1, gate.max_depth, 0))
        outcome = Outcome(nothing, nothing, count[None], features, nothing)
        memory = gate.learn(arrays, memory, outcome)
        return memory, place + count, drafted + opens, plain + ~opens

    zero = jnp.int32(0)
    carry = memory, zero, zero, zero
    _, _, drafted, plain = jax.lax.while_loop(
        lambda carry: carry[1] < length, call, carry
    )
    return drafted, plain


@dataclasses.dataclass(frozen=True)
class _NothingToLearn:
    """Stands for a drafter, of which the gate needs the depth alone."""

    max_depth: int = 8
    arrays: Any = None

    def start(self, arrays: Any, prompts: Prompts) -> Any:
        return ()

    def learn(self, arrays: Any, memory: Any, outcome: Outcome) -> Any:
        return memory
