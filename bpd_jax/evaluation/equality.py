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
      gap: difference of the two best logits of the model there.
      near_tie: both tokens are the model's best, up to rounding.
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
      gap: median difference of the two best logits where texts part; None likewise.
    """

    rate: float
    first: int | None = None
    gap: float | None = None


def divergence(differences: Sequence[Difference], prompts: int) -> Divergence:
    """Sums up the differences among some prompts."""
    if not differences:
        return Divergence(0.0)
    return Divergence(
        rate=len(differences) / prompts,
        first=1 + min(difference.position for difference in differences),
        gap=float(np.median([difference.gap for difference in differences])),
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
            text = np.concatenate([wanted.input_ids, wanted.output_ids[:position]])
            gap = _gap(model, params, text)
            found.append(Difference(index, position, gap, gap < tie))
    return found


def _gap(model: ModelFunctions, params: Params, text: np.ndarray) -> float:
    """Difference of the two best next-token logits after `text`."""
    tokens = jnp.asarray(text)[None]
    positions = jnp.arange(len(text))[None]
    mask = causal_mask(jnp.ones_like(tokens))
    hidden, _ = model.forward(params, tokens, positions, mask)
    best = np.sort(np.asarray(model.next_token_logits(params, hidden[0, -1])))[-2:]
    return float(best[1] - best[0])
