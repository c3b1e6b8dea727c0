"""Whether two decodings of the same prompts are the same text, and if not, why."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.generate import Generation
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.typing import Params

# Two logits closer than this are equal up to float32 rounding: a forward pass of
# another shape adds the same numbers in another order, and either token may win.
NEAR_TIE = 1e-4


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a text leaves the reference.

    Attributes:
      prompt_index: of the prompt.
      position: index in `output_ids` of the first token that differs.
      gap: difference of the two best logits of the model there.
    """

    prompt_index: int
    position: int
    gap: float

    @property
    def near_tie(self) -> bool:
        """Both tokens are the model's best, up to rounding."""
        return self.gap < NEAR_TIE


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
    for index, (wanted, got) in enumerate(zip(reference, other, strict=True)):
        position = first_difference(wanted.output_ids, got.output_ids)
        if position is not None:
            text = np.concatenate([wanted.input_ids, wanted.output_ids[:position]])
            found.append(Difference(index, position, _gap(model, params, text)))
    return found


def _gap(model: ModelFunctions, params: Params, text: np.ndarray) -> float:
    """Difference of the two best next-token logits after `text`."""
    tokens = jnp.asarray(text)[None]
    positions = jnp.arange(len(text))[None]
    mask = causal_mask(jnp.ones_like(tokens))
    hidden, _ = model.forward(params, tokens, positions, mask)
    best = np.sort(np.asarray(model.next_token_logits(params, hidden[0, -1])))[-2:]
    return float(best[1] - best[0])
