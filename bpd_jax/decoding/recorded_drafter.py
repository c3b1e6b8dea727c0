"""Records a block drafter's candidates along known texts, for replay.

Replay does not run the model, so there are no states for the drafter to read. Its
candidates at every position of the texts are recorded instead, and `RecordedDrafter`
takes the drafter's place.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.drafting.assets import AttachedDrafter
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.typing import Array, Float, Int, Params

# Positions of a text whose blocks are drafted in one batch.
_CHUNK = 32

# Candidates, log-probabilities and entropies along one text; see `record_drafter`.
TextDrafts = tuple[np.ndarray, np.ndarray, np.ndarray]


@flax.struct.dataclass
class RecordedDrafts:
    """Candidates along R texts, padded to N positions.

    Attributes:
      starts: position of the last token of each prompt, to which column 0 belongs.
      candidates, log_probs, entropies: see `DrafterFunctions.candidates`.
    """

    starts: Int[Array, " R"]
    candidates: Int[Array, "R N L-1 W"]
    log_probs: Float[Array, "R N L-1 W"]
    entropies: Float[Array, "R N L-1"]


@dataclasses.dataclass(frozen=True)
class RecordedDrafter:
    """The methods of `DrafterFunctions` that drafting calls, with recorded candidates.

    The cache is the lengths of the rows.

    Attributes:
      config: sizes of the drafter.
    """

    config: BlockDrafterConfig

    def prefill(
        self, params: RecordedDrafts, features: Array, lengths: Array, length: int
    ) -> Int[Array, " B"]:
        """The lengths of the prompts."""
        del params, features, length
        return lengths

    def append(
        self, params: RecordedDrafts, cache: Array, features: Array, counts: Array
    ) -> Int[Array, " B"]:
        """The lengths of the texts."""
        del params, features
        return cache + counts

    def candidates(
        self, params: RecordedDrafts, cache: Array, anchors: Array, width: int
    ) -> tuple[Array, Array, Array]:
        """The candidates recorded at each row's last token."""
        del anchors
        rows = jnp.arange(cache.shape[0])
        last = params.candidates.shape[1] - 1
        columns = jnp.clip(cache - 1 - params.starts, 0, last)
        return (
            params.candidates[rows, columns, :, :width],
            params.log_probs[rows, columns, :, :width],
            params.entropies[rows, columns],
        )


def record_drafter(
    decoder: Decoder, tokens: Int[Array, " S"], start: int, width: int, count: int
) -> TextDrafts:
    """Candidates of the decoder's block drafter along one text.

    Args:
      decoder: the model and the drafter.
      tokens: prompt and text, padded.
      start: position of the prompt's last token.
      width: W, number of candidates.
      count: N, number of positions, beginning with `start`.

    Returns:
      Tokens and log-probabilities `[N, L-1, W]`, and entropies `[N, L-1]`.
    """
    drafter = decoder.assets.drafter
    assert drafter is not None
    vocab_size = decoder.model.config.trunk.vocab_size
    choices = drafter.functions.config.draft_vocabulary or vocab_size
    drafts = _record(
        decoder.model,
        decoder.params,
        drafter.functions,
        drafter.params,
        tokens,
        jnp.int32(start),
        min(width, choices),
        count,
    )
    candidates, log_probs, entropies = map(np.asarray, jax.device_get(drafts))
    return candidates, log_probs, entropies


@functools.partial(jax.jit, static_argnames=("model", "functions", "width", "count"))
def _record(
    model: ModelFunctions,
    params: Params,
    functions: DrafterFunctions,
    drafter: Params,
    tokens: Int[Array, " S"],
    start: Int[Array, ""],
    width: int,
    count: int,
) -> tuple[Array, Array, Array]:
    every_position = jnp.arange(tokens.shape[0])[None]
    mask = causal_mask(jnp.ones_like(every_position))
    layers = functions.config.feature_layers
    hidden, _, features = model.forward(
        params, tokens[None], every_position, mask, layers=layers
    )
    next_tokens = model.greedy_tokens(params, hidden[0])

    def drafts_at(chunk: Int[Array, " A"]) -> tuple[Array, Array, Array]:
        # Results past the end of the text are not used.
        positions = jnp.minimum(chunk, tokens.shape[0] - 1)
        states = functions.teacher_forced_states(
            drafter,
            features,
            every_position,
            model.embed(params, next_tokens[positions])[None],
            positions[None] + 1,
        )
        return functions.best(drafter, states[0], width)

    # In chunks, because of the memory for the attention of all blocks.
    chunks = -(-count // _CHUNK)
    positions = start + jnp.arange(chunks * _CHUNK).reshape(chunks, _CHUNK)
    drafts = jax.lax.map(drafts_at, positions)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], drafts)


def stack_padded(arrays: Sequence[np.ndarray], length: int) -> Array:
    """Stacks arrays, padded with zeros to `length` entries."""
    stacked = np.zeros((len(arrays), length, *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in enumerate(arrays):
        stacked[row, : len(array)] = array
    return jnp.asarray(stacked)


def recorded_drafter(
    drafter: AttachedDrafter,
    starts: Sequence[int],
    drafts: Sequence[TextDrafts],
    positions: int,
) -> AttachedDrafter:
    """Replaces a drafter by its recorded candidates.

    Args:
      drafter: the drafter that was recorded.
      starts: see `RecordedDrafts`.
      drafts: results of `record_drafter` for each text.
      positions: N, number of positions to which they are padded.
    """
    columns = (stack_padded(arrays, positions) for arrays in zip(*drafts, strict=True))
    arrays = RecordedDrafts(jnp.asarray(starts, jnp.int32), *columns)
    functions: Any = RecordedDrafter(drafter.functions.config)
    return AttachedDrafter(functions, arrays, (), drafter.markov)
