"""Compares two decodings of the same prompts, and explains differences."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.generate import Generation
from bpd_jax.models.attention import Segments
from bpd_jax.models.model import Model
from bpd_jax.models.partitioning import on_host

# Two logits closer than this are equal up to rounding: a forward pass of another shape
# sums the same numbers in another order, and either token may have the larger logit. A
# logit of 16 has a rounding error of 0.06 in bfloat16 and 0.008 in float16, and the
# layers of the trunk add to it.
NEAR_TIES = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.03}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between a text and the reference.

    Attributes:
      prompt_index: index of the prompt.
      position: index in `output_ids` of the first token that differs.
      gap: difference between the model's largest logit at that position and the lower
        logit of the two tokens; infinite if one of the texts has ended there.
      near_tie: whether both tokens are the most probable one, up to rounding. False
        for a text that merely stops early: the end-of-text token is part of a text.
    """

    prompt_index: int
    position: int
    gap: float
    near_tie: bool


def divergence(
    differences: Sequence[Difference], prompts: int
) -> dict[str, float] | None:
    """Summarises the differences of a number of prompts.

    Returns:
      `rate`, the share of prompts whose text differs; `first`, the smallest number,
      from 1, of a differing token; and `gap`, the median of the finite gaps, 0 without
      one. None if all texts are equal.
    """
    if not differences:
        return None
    gaps = [d.gap for d in differences if np.isfinite(d.gap)]
    return {
        "rate": len(differences) / prompts,
        "first": 1 + min(difference.position for difference in differences),
        "gap": float(np.median(gaps)) if gaps else 0.0,
    }


def first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    """Index of the first differing element; None if both arrays are equal.

    >>> first_difference(np.array([1, 2, 3]), np.array([1, 2]))
    2
    """
    if np.array_equal(a, b):
        return None
    shared = min(len(a), len(b))
    differing = np.flatnonzero(a[:shared] != b[:shared])
    return int(differing[0]) if differing.size else shared


def differences(
    model: Model,
    reference: Sequence[Generation],
    other: Sequence[Generation],
) -> list[Difference]:
    """The prompts whose greedy output differs from the reference in some token.

    The model runs only for prompts whose outputs differ.
    """
    results = []
    tie = NEAR_TIES[model.config.trunk.dtype]
    for index, (expected, actual) in enumerate(zip(reference, other, strict=True)):
        position = first_difference(expected.output_ids, actual.output_ids)
        if position is not None:
            gap = _gap(model, expected, actual, position)
            results.append(Difference(index, position, gap, gap < tie))
    return results


def _gap(
    model: Model,
    expected: Generation,
    actual: Generation,
    position: int,
) -> float:
    """The `gap` of two texts that differ first at `position`."""
    if position >= min(len(expected.output_ids), len(actual.output_ids)):
        return float("inf")
    text = np.concatenate([expected.input_ids, expected.output_ids[:position]])
    tokens = jnp.asarray(text)[None]
    positions = jnp.arange(len(text))[None]
    hidden, *_ = model.forward(tokens, positions, Segments())
    logits = on_host(model.next_token_logits(hidden[0, -1]))
    chosen = [expected.output_ids[position], actual.output_ids[position]]
    return float(logits.max() - logits[chosen].min())
