"""What a model says along known texts, and a stand-in that answers from there."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.recorded_drafter import record_drafter
from bpd_jax.decoding.verification import forward
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.functions import ModelFunctions, entropy
from bpd_jax.typing import Array, Bool, Float, Int, Params

# Positions whose logits of all heads exist at the same time, and texts' lengths are
# padded to a multiple of it.
_CHUNK = 32


@dataclasses.dataclass(frozen=True)
class RecordedText:
    """One decoded text of n tokens and what the model says along it.

    Column t is what it says where the text's token t comes next: heads 2 … L about
    the tokens t + 1 … t + L - 1.

    Attributes:
      input_ids, output_ids: prompt and text, int32.
      candidates: of heads 2 … L, best first `[n, L-1, W]` int32.
      log_probs: theirs, in nats `[n, L-1, W]` float32.
      entropies: of heads 1 … L, in nats `[n, L]` float32.
      hidden: final hidden states `[n, D]`.
      drafter: candidates, log-probabilities and entropies of a block drafter at the
        same columns, of its positions 1 … L-1; None without one.
    """

    input_ids: np.ndarray
    output_ids: np.ndarray
    candidates: np.ndarray
    log_probs: np.ndarray
    entropies: np.ndarray
    hidden: np.ndarray
    drafter: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None


@flax.struct.dataclass
class Recording:
    """What a model says along R texts, with room for N positions of each.

    Attributes:
      tokens: prompt and text.
      starts: position of each prompt's last token: what was recorded begins there.
      candidates, log_probs, entropies: of heads 2 … L from there on; see
        `ModelFunctions.block_candidates`.
      hidden: final hidden states, or None if they were not kept.
      params: the model's parameters where hidden states are kept, for drafters that
        use its embedding and softmax.
    """

    tokens: Int[Array, "R S"]
    starts: Int[Array, " R"]
    candidates: Int[Array, "R N L-1 W"]
    log_probs: Float[Array, "R N L-1 W"]
    entropies: Float[Array, "R N L-1"]
    hidden: Float[Array, "R N D"] | None = None
    params: Params | None = None

    def places(self, hidden: Int[Array, "... 2"]) -> tuple[Array, Array]:
        """Row and column of what was recorded, of a row and a position each."""
        row, position = hidden[..., 0], hidden[..., 1]
        last = self.candidates.shape[1] - 1
        return row, jnp.clip(position - self.starts[row], 0, last)


@dataclasses.dataclass(frozen=True)
class RecordedModel:
    """Answers from a recording; hashable, and decodable like `ModelFunctions`.

    What stands for a hidden state is the row and the position of a token. It means
    something where the token and its ancestors are those of the text, and nothing else
    is ever accepted.

    Attributes:
      config: of the model that was recorded.
      width: the most candidates per head that there are.
    """

    config: BlockwiseConfig
    width: int

    @property
    def block_size(self) -> int:
        """L."""
        return self.config.block_size

    @property
    def head_features(self) -> tuple[int, ...]:
        """None: candidates were recorded."""
        return ()

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        """A cache of no layers."""
        del slots
        return KVCache((), (), jnp.zeros((batch,), jnp.int32))

    def forward(
        self,
        params: Recording,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"],
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
    ) -> tuple[Int[Array, "B T 2"], KeyValues]:
        """Row and position of every token."""
        del mask, cache, earlier
        rows = jnp.broadcast_to(jnp.arange(tokens.shape[0])[:, None], tokens.shape)
        nothing = jnp.zeros((0, *tokens.shape, 1, 1), jnp.float32)
        last = params.tokens.shape[1] - 1
        places = jnp.stack([rows, jnp.minimum(positions, last)], axis=-1)
        return places, KeyValues(nothing, nothing)

    def greedy_tokens(
        self, params: Recording, hidden: Int[Array, "... 2"]
    ) -> Int[Array, "..."]:
        """The token of the text that comes next."""
        row, place = hidden[..., 0], hidden[..., 1]
        return params.tokens[row, jnp.minimum(place + 1, params.tokens.shape[1] - 1)]

    def block_candidates(
        self,
        params: Recording,
        hidden: Int[Array, "B 2"],
        block_size: int,
        width: int,
        *conditions: Any,
    ) -> tuple[Array, Array, Array]:
        """The candidates that were recorded there, whatever the heads read."""
        del conditions
        row, column = params.places(hidden)
        heads = block_size - 1
        return (
            params.candidates[row, column, :heads, :width],
            params.log_probs[row, column, :heads, :width],
            params.entropies[row, column, :heads],
        )

    def states(self, params: Recording, hidden: Int[Array, "B 2"]) -> Array:
        """The hidden states that were recorded."""
        assert params.hidden is not None
        return params.hidden[params.places(hidden)]

    def embed(self, params: Recording, tokens: Array) -> Array:
        """Token embeddings of the model itself."""
        return ModelFunctions(self.config).embed(params.params, tokens)

    def draft_logits(self, params: Recording, states: Array, level: int) -> Array:
        """The model's own, over its draft vocabulary."""
        return ModelFunctions(self.config).draft_logits(params.params, states, level)

    def draft_tokens(self, params: Recording, indices: Array) -> Array:
        """Token ids of places in the model's draft vocabulary."""
        return ModelFunctions(self.config).draft_tokens(params.params, indices)


def record_text(
    decoder: Decoder, text: Generation, width: int, *, slots: int, positions: int
) -> RecordedText:
    """Runs the model once over a text.

    Args:
      decoder: the model that wrote it.
      text: prompt and what was decoded.
      width: W, candidates kept per head.
      slots, positions: to which the whole text and its decoded part are padded; see
        `padded_sizes`. Texts that are padded alike share a compiled program.
    """
    prompt, output = text.input_ids, text.output_ids
    tokens = np.zeros(slots, np.int32)
    tokens[: len(prompt) + len(output)] = np.concatenate([prompt, output])
    found = _record(
        decoder.model,
        decoder.params,
        jnp.asarray(tokens),
        jnp.int32(len(prompt) - 1),
        width,
        positions,
    )
    drafts = None
    if decoder.assets.drafter is not None:
        start = len(prompt) - 1
        every = record_drafter(decoder, jnp.asarray(tokens), start, width, positions)
        candidates, log_probs, entropies = (array[: len(output)] for array in every)
        drafts = candidates, log_probs, entropies
    # On the host: a replay runs on one device, wherever the model was.
    arrays = [np.asarray(array)[: len(output)] for array in jax.device_get(found)]
    shown, scores, spread, hidden = arrays
    return RecordedText(
        np.asarray(prompt, np.int32), output, shown, scores, spread, hidden, drafts
    )


def padded_sizes(texts: Sequence[Generation | RecordedText]) -> tuple[int, int]:
    """Slots of whole texts and of their decoded parts that hold all of these."""
    most = max(len(text.output_ids) for text in texts)
    longest = max(len(text.input_ids) + len(text.output_ids) for text in texts)
    # What is recorded begins at the prompt's end, and must lie within the slots.
    positions = _rounded(most)
    beyond = max(len(text.input_ids) for text in texts) + positions
    return _rounded(max(longest, beyond)), positions


def _rounded(count: int) -> int:
    return max(-(-count // _CHUNK), 1) * _CHUNK


@functools.partial(jax.jit, static_argnames=("model", "width", "count"))
def _record(
    model: ModelFunctions,
    params: Params,
    tokens: Int[Array, " S"],
    start: Int[Array, ""],
    width: int,
    count: int,
) -> tuple[Array, Array, Array, Array]:
    """What the model says after `count` tokens from `start` on; see `RecordedText`."""
    positions = jnp.arange(tokens.shape[0])[None]
    mask = causal_mask(jnp.ones_like(positions))
    states, _, features = forward(
        model, params, model.head_features, tokens[None], positions, mask
    )
    hidden = jax.lax.dynamic_slice_in_dim(states[0], start, count)
    if features is not None:
        features = jax.lax.dynamic_slice_in_dim(features[0], start, count)

    def some(
        inputs: tuple[Float[Array, "chunk D"], Float[Array, "chunk F"] | None],
    ) -> tuple[Array, Array, Array]:
        states, features = inputs
        logits = model.next_token_logits(params, states).astype(jnp.float32)
        own = jax.nn.log_softmax(logits)
        first = entropy(own)[:, None]
        if model.block_size == 1:
            nothing = jnp.zeros((states.shape[0], 0, width))
            return nothing.astype(jnp.int32), nothing, first
        candidates, log_probs, entropies = model.block_candidates(
            params, states, model.block_size, width, logits.argmax(-1), features
        )
        return candidates, log_probs, jnp.concatenate([first, entropies], axis=1)

    chunks = jax.tree.map(
        lambda array: array.reshape(-1, _CHUNK, array.shape[-1]), (hidden, features)
    )
    found = jax.lax.map(some, chunks)
    candidates, log_probs, entropies = (
        array.reshape(count, *array.shape[2:]) for array in found
    )
    return candidates, log_probs, entropies, hidden


def assemble(
    texts: Sequence[RecordedText],
    params: Params | None = None,
    sizes: tuple[int, int] | None = None,
) -> Recording:
    """Puts recorded texts together.

    Args:
      texts: of one model, with candidates of one width.
      params: the model's parameters if hidden states are to be kept.
      sizes: S and N; by default the least that hold all.
    """
    slots, positions = sizes or padded_sizes(texts)
    tokens = np.zeros((len(texts), slots), np.int32)
    for row, text in enumerate(texts):
        whole = np.concatenate([text.input_ids, text.output_ids])
        tokens[row, : len(whole)] = whole

    def padded(name: str, columns: slice = slice(None)) -> Array:
        parts = [getattr(text, name)[:, columns] for text in texts]
        shape = (len(texts), positions, *parts[0].shape[1:])
        together = np.zeros(shape, parts[0].dtype)
        for row, part in enumerate(parts):
            together[row, : len(part)] = part
        return jnp.asarray(together)

    return Recording(
        jnp.asarray(tokens),
        jnp.asarray([len(text.input_ids) - 1 for text in texts], jnp.int32),
        padded("candidates"),
        padded("log_probs"),
        padded("entropies", slice(1, None)),
        None if params is None else padded("hidden"),
        params,
    )
