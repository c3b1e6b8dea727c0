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

from bpd_jax.base.typing import Array, Float, Int, Params
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.options import StepOptions
from bpd_jax.decoding.sampling import CommonNoise, common_noise
from bpd_jax.drafting.assets import AttachedDrafter
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.model import Model
from bpd_jax.models.partitioning import on_host
from bpd_jax.models.trained_refiners import markov_factors

# Positions for which logits and blocks are computed at once. The decoded parts of texts
# are padded to a multiple of it.
CHUNK = 32

# Candidates, log-probabilities, entropies and perhaps factors along one text; see
# `record_drafter`.
TextDrafts = tuple[np.ndarray, ...]


@flax.struct.dataclass
class RecordedDrafts:
    """Candidates along R texts, padded to N positions.

    Attributes:
      starts: position of the last token of each prompt, to which column 0 belongs.
      candidates, log_probs, entropies, factors: see `DrafterFunctions.candidates`.
    """

    starts: Int[Array, " R"]
    candidates: Int[Array, "R N L-1 W"]
    log_probs: Float[Array, "R N L-1 W"]
    entropies: Float[Array, "R N L-1"]
    factors: Float[Array, "R N L-1 F"] | None = None

    def columns(
        self, rows: Int[Array, "..."], positions: Int[Array, "..."]
    ) -> Int[Array, "..."]:
        """The columns of positions of the texts."""
        last = self.candidates.shape[1] - 1
        return jnp.clip(positions - self.starts[rows], 0, last)

    def at(
        self,
        rows: Int[Array, " B"],
        places: Int[Array, " B"],
        positions: int,
        width: int,
    ) -> tuple[Array, Array, Array, Array | None]:
        """What was recorded at these places of the texts, of the first positions."""
        at = rows, self.columns(rows, places), slice(positions)
        return (
            self.candidates[*at, :width],
            self.log_probs[*at, :width],
            self.entropies[at],
            None if self.factors is None else self.factors[at],
        )


@dataclasses.dataclass(frozen=True)
class RecordedDrafter:
    """The methods of `DrafterFunctions` that drafting calls, with recorded candidates.

    The cache is the lengths of the rows.
    """

    config: BlockDrafterConfig

    def prefill(
        self, params: RecordedDrafts, features: Array, lengths: Array, length: int
    ) -> Int[Array, " B"]:
        """The lengths of the prompts."""
        return lengths

    def append(
        self, params: RecordedDrafts, cache: Array, features: Array, counts: Array
    ) -> Int[Array, " B"]:
        """The lengths of the texts."""
        return cache + counts

    def candidates(
        self,
        params: RecordedDrafts,
        cache: Array,
        anchors: Array,
        positions: int,
        width: int,
        perturb: None = None,
    ) -> tuple[Array, Array, Array, Array | None]:
        """The candidates recorded at each row's last token."""
        rows = jnp.arange(cache.shape[0])
        return params.at(rows, cache - 1, positions, width)


def record_drafter(
    decoder: Decoder,
    features: Float[Array, "S F"],
    next_tokens: Int[Array, " N"],
    start: Int[Array, ""],
    width: int,
    noise: tuple[Array | None, StepOptions | None] = (None, None),
) -> TextDrafts:
    """Candidates of the decoder's block drafter along one text.

    Args:
      features: outputs of the drafter's layers of the model at every token.
      next_tokens: the model's choices of the tokens after N positions, a multiple of
        `CHUNK`.
      start: the first of these positions, that of the prompt's last token.
      width: W, number of candidates.
      noise: key and options of `noise_along`.

    Returns:
      Tokens and log-probabilities `[N, L-1, W]`, entropies `[N, L-1]`; and factors
      `[N, L-1, R]` if the drafter's Markov head reads its states.
    """
    drafter, model = decoder.assets.drafter, decoder.model
    assert drafter is not None
    functions, vocab_size = drafter.functions, model.config.trunk.vocab_size
    width = min(width, functions.config.draft_vocabulary or vocab_size)
    drafts = _record(
        model, functions, drafter.params, features, next_tokens, start, width, *noise
    )
    return tuple(map(np.asarray, on_host(drafts)))


@functools.partial(jax.jit, static_argnames=("functions", "width", "options"))
def _record(
    model: Model,
    functions: DrafterFunctions,
    drafter: Params,
    features: Float[Array, "S F"],
    next_tokens: Int[Array, " N"],
    start: Int[Array, ""],
    width: int,
    key: Array | None,
    options: StepOptions | None,
) -> tuple[Array, ...]:
    every_position = jnp.arange(features.shape[0])[None]

    def drafts_at(chunk: tuple[Array, Array]) -> tuple[Array, ...]:
        positions, tokens = chunk
        states = functions.teacher_forced_states(
            drafter,
            features[None],
            every_position,
            model.embed(tokens)[None],
            positions[None] + 1,
        )
        noise = noise_along(model, key, positions + 1, options)
        best = functions.best(drafter, states[0], width, noise)
        if not functions.config.markov_reads_state:
            return best
        factors = markov_factors(drafter["markov"], states[0])
        assert factors is not None
        return (*best, factors)

    # In chunks, because of the memory for the attention of all blocks.
    positions = (start + jnp.arange(len(next_tokens))).reshape(-1, CHUNK)
    drafts = jax.lax.map(drafts_at, (positions, next_tokens.reshape(-1, CHUNK)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), drafts)


def noise_along(
    model: Model,
    key: Array | None,
    certain: Int[Array, " N"],
    options: StepOptions | None,
) -> CommonNoise | None:
    """The noise for drafts along one text; None where it has no random numbers.

    Args:
      key: the random key of the text.
      certain: indices of the certain tokens in the text.
      options: options with which it was sampled.
    """
    if key is None or options is None:
        return None
    return common_noise(model, jnp.broadcast_to(key, certain.shape), certain, options)


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
      starts: see `RecordedDrafts`.
      drafts: results of `record_drafter` for each text.
      positions: N, number of positions to which they are padded.
    """
    columns = (stack_padded(arrays, positions) for arrays in zip(*drafts, strict=True))
    arrays = RecordedDrafts(jnp.asarray(starts, jnp.int32), *columns)
    functions: Any = RecordedDrafter(drafter.functions.config)
    return AttachedDrafter(functions, arrays, (), drafter.markov)
