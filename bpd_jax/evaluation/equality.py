"""Whether two decodings of the same prompts are the same text, and if not, why."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.generate import Generation
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.typing import Params

# Two logits closer than this are equal up to rounding: a forward pass of another shape
# adds the same numbers in another order, and either token may win. In half precision a
# logit of 16 has a rounding error of 0.06 and 0.008, and a trunk adds to it.
NEAR_TIES = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.03}


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a text leaves the reference.

    Attributes:
      prompt_index: of the prompt.
      position: index in `output_ids` of the first token that differs.
      gap: how far the lower of the two tokens' logits lies below the model's best one
        there; infinite if one of the texts has no token there.
      near_tie: both tokens are the model's best, up to rounding. A text that just
        stops is never one: its end-of-text token would be part of it.
    """

    prompt_index: int
    position: int
    gap: float
    near_tie: bool


@dataclasses.dataclass(frozen=True)
class Divergence:
    """How far the texts of a method are from the reference.

    Attributes:
      rate: share of prompts whose text differs.
      first: the first token that differs, of the prompt where that comes earliest,
        from 1; None if all are equal.
      gap: median gap where texts part, of texts that do not just stop; None if there
        are none.
    """

    rate: float
    first: int | None = None
    gap: float | None = None


def divergence(differences: Sequence[Difference], prompts: int) -> Divergence:
    """Sums up the differences among some prompts."""
    if not differences:
        return Divergence(0.0)
    gaps = [d.gap for d in differences if np.isfinite(d.gap)]
    return Divergence(
        rate=len(differences) / prompts,
        first=1 + min(difference.position for difference in differences),
        gap=float(np.median(gaps)) if gaps else None,
    )


def first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    """Index of the first differing element, None if both are the same.

    >>> first_difference(np.array([1, 2, 3]), np.array([1, 2]))
    2
    """
    if np.array_equal(a, b):
        return None
    shared = min(len(a), len(b))
    differing = np.flatnonzero(a[:shared] != b[:shared])
    return int(differing[0]) if differing.size else shared


def differences(
    model: ModelFunctions,
    params: Params,
    reference: Sequence[Generation],
    other: Sequence[Generation],
) -> list[Difference]:
    """Every prompt whose greedy output is not that of the reference, token for token.

    Nothing is computed for prompts whose outputs are equal.
    """
    found = []
    tie = NEAR_TIES[model.config.trunk.dtype]
    for index, (wanted, got) in enumerate(zip(reference, other, strict=True)):
        position = first_difference(wanted.output_ids, got.output_ids)
        if position is not None:
            gap = _gap(model, params, wanted, got, position)
            found.append(Difference(index, position, gap, gap < tie))
    return found


def _gap(
    model: ModelFunctions,
    params: Params,
    wanted: Generation,
    got: Generation,
    position: int,
) -> float:
    """The `gap` of two texts that part at `position`."""
    if position >= min(len(wanted.output_ids), len(got.output_ids)):
        return float("inf")
    text = np.concatenate([wanted.input_ids, wanted.output_ids[:position]])
    tokens = jnp.asarray(text)[None]
    positions = jnp.arange(len(text))[None]
    mask = causal_mask(jnp.ones_like(tokens))
    hidden, _ = model.forward(params, tokens, positions, mask)
    logits = np.asarray(model.next_token_logits(params, hidden[0, -1]))
    chosen = [wanted.output_ids[position], got.output_ids[position]]
    return float(logits.max() - logits[chosen].min())
