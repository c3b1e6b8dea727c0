"""Recording of a model's outputs along known texts, and a model that looks them up."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.options import DecodeOptions, StepOptions
from bpd_jax.decoding.recorded_drafter import (
    CHUNK,
    RecordedDrafts,
    noise_along,
    record_drafter,
    stack_padded,
)
from bpd_jax.decoding.sampling import row_keys
from bpd_jax.models.attention import WholeTexts
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.candidates import entropy
from bpd_jax.models.model import Model
from bpd_jax.models.partitioning import on_host
from bpd_jax.models.programs import Program
from bpd_jax.models.segment_attention import Segments


@dataclasses.dataclass(frozen=True)
class RecordedText:
    """A decoded text of n tokens and the model's outputs along it.

    Column t contains the outputs before token t of the text: heads 2 … L predict the
    tokens t + 1 … t + L - 1.

    Attributes:
      input_ids, output_ids: prompt and text, int32.
      candidates: `[n, L-1, W]` int32, candidates of heads 2 … L, best first.
      log_probs: `[n, L-1, W]` float32, their log-probabilities, in nats.
      entropies: `[n, L]` float32, entropies of heads 1 … L in nats; that of head 1 is
        over the draft vocabulary of the others, so that they can be compared.
      drafter: candidates, log-probabilities, entropies and perhaps factors of a block
        drafter at the same columns, for its positions 1 … L-1 (`record_drafter`); None
        without a drafter.
    """

    input_ids: np.ndarray
    output_ids: np.ndarray
    candidates: np.ndarray
    log_probs: np.ndarray
    entropies: np.ndarray
    drafter: tuple[np.ndarray, ...] | None = None

    def predicted_by(self, source: str) -> "RecordedText":
        """Returns the text with the predictions of `heads` or `block` as candidates."""
        if source == "heads":
            return self
        if self.drafter is None:
            raise UserError("the text was recorded without a block drafter.")
        candidates, log_probs, entropies = self.drafter[:3]
        return dataclasses.replace(
            self,
            candidates=candidates,
            log_probs=log_probs,
            entropies=np.concatenate([self.entropies[:, :1], entropies], axis=1),
        )


@flax.struct.dataclass
class Recording:
    """The outputs of a model along R texts, padded to N positions each.

    Attributes:
      tokens: prompts and texts.
      drafts: outputs of heads 2 … L; see `Model.block_candidates`.
    """

    tokens: Int[Array, "R S"]
    drafts: RecordedDrafts


@flax.struct.dataclass
class RecordedModel:
    """A model that looks up its outputs in a recording.

    It has the methods of `Model` that decoding calls. In place of a hidden
    state it returns the row and the position of a token. They are meaningful if the
    token and its ancestors are those of the text; other tokens are never accepted.

    Attributes:
      width: number of recorded candidates per head.
    """

    config: BlockwiseConfig = flax.struct.field(pytree_node=False)
    width: int = flax.struct.field(pytree_node=False)
    recording: Recording
    mesh = None  # A replay runs on one device.

    @property
    def block_size(self) -> int:
        """L."""
        return self.config.block_size

    @property
    def head_features(self) -> tuple[int, ...]:
        """No layers, because candidates are recorded."""
        return ()

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        """A cache without layers."""
        return KVCache((), (), jnp.zeros((batch,), jnp.int32))

    def forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"] | WholeTexts,
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
        *,
        layers: tuple[int, ...] = (),
    ) -> tuple[Int[Array, "B T 2"], KeyValues, Array]:
        """Row and position of every token; no keys, values or features."""
        rows = jnp.broadcast_to(jnp.arange(tokens.shape[0])[:, None], tokens.shape)
        empty = jnp.zeros((0, *tokens.shape, 1, 1), jnp.float32)
        last = self.recording.tokens.shape[1] - 1
        hidden = jnp.stack([rows, jnp.minimum(positions, last)], axis=-1)
        return hidden, KeyValues(empty, empty), jnp.zeros((*tokens.shape, 0))

    def greedy_tokens(self, hidden: Int[Array, "... 2"]) -> Int[Array, "..."]:
        """The next token of the text."""
        row, position = hidden[..., 0], hidden[..., 1]
        last = self.recording.tokens.shape[1] - 1
        return self.recording.tokens[row, jnp.minimum(position + 1, last)]

    def block_candidates(
        self,
        hidden: Int[Array, "B 2"],
        block_size: int,
        width: int,
        *conditions: Any,
    ) -> tuple[Array, Array, Array]:
        """The recorded candidates; the inputs of conditioned heads are ignored."""
        rows, places = hidden[:, 0], hidden[:, 1]
        return self.recording.drafts.at(rows, places, block_size - 1, width)[:3]


def record_text(
    decoder: Decoder,
    text: Generation,
    width: int,
    *,
    slots: int,
    positions: int,
    sampled: tuple[DecodeOptions, int] | None = None,
) -> RecordedText:
    """Runs the model once over a text and records its outputs.

    Args:
      width: W, candidates recorded per head.
      sampled: options with which the text was sampled and the index of its prompt, for
        candidates with the random numbers of the text; None for candidates without.
      slots, positions: lengths to which the text and its decoded part are padded;
        see `padded_sizes`. Texts of equal lengths share a compiled program.
    """
    prompt, output = text.input_ids, text.output_ids
    tokens = np.zeros(slots, np.int32)
    tokens[: len(prompt) + len(output)] = np.concatenate([prompt, output])
    start = jnp.int32(len(prompt) - 1)
    drafter, drafts = decoder.assets.drafter, None
    layers = () if drafter is None else drafter.functions.config.feature_layers
    options, key = None, None
    if sampled is not None:
        options = sampled[0].step
        [key] = row_keys(np.uint32(sampled[0].seed), jnp.array([sampled[1]]))
    text_tokens = jnp.asarray(tokens)
    *outputs, features, next_tokens = _record(
        decoder.model, text_tokens, start, key, width, positions, layers, options
    )
    if drafter is not None:
        noise = (key, options)
        padded = record_drafter(decoder, features, next_tokens, start, width, noise)
        drafts = tuple(array[: len(output)] for array in padded)
    # On the host, because a replay may run on another device than the model.
    arrays = (np.asarray(array)[: len(output)] for array in on_host(outputs))
    candidates, log_probs, entropies = arrays
    prompt = np.asarray(prompt, np.int32)
    return RecordedText(prompt, output, candidates, log_probs, entropies, drafts)


def padded_sizes(texts: Sequence[Generation | RecordedText]) -> tuple[int, int]:
    """Lengths to which whole texts and their decoded parts can be padded."""
    most = max(len(text.output_ids) for text in texts)
    longest = max(len(text.input_ids) + len(text.output_ids) for text in texts)
    # The padded recording begins at the end of the prompt and must fit into the text.
    positions = _rounded(most)
    recorded = max(len(text.input_ids) for text in texts) + positions
    return _rounded(max(longest, recorded)), positions


def _rounded(count: int) -> int:
    return max(-(-count // CHUNK), 1) * CHUNK


@functools.partial(
    Program,
    static=("width", "count", "layers", "options"),
    constants=("model",),
    in_order=True,
)
def _record(
    model: Model,
    tokens: Int[Array, " S"],
    start: Int[Array, ""],
    key: Array | None,
    width: int,
    count: int,
    layers: tuple[int, ...],
    options: StepOptions | None,
) -> tuple[Array, ...]:
    """The outputs at `count` positions from `start` on; see `RecordedText`.

    Returns:
      Candidates, log-probabilities and entropies; and for `record_drafter` the outputs
      `[S, F]` of `layers` and the certain token at every position.
    """
    positions = jnp.arange(tokens.shape[0])[None]
    choices = jnp.arange(model.config.draft_vocab_size)
    read = model.head_features
    states, _, features = model.forward(
        tokens[None], positions, Segments(), layers=(*read, *layers)
    )
    for_heads, for_drafter = jnp.split(
        features[0], [len(read) * states.shape[-1]], axis=-1
    )
    hidden, for_heads = (
        jax.lax.dynamic_slice_in_dim(array, start, count)
        for array in (states[0], for_heads)
    )

    # The text's own tokens, which may be sampled, or chosen from adjusted logits.
    places = start + 1 + jnp.arange(count)
    certain = tokens[jnp.minimum(places, tokens.shape[0] - 1)]

    def chunk_outputs(
        inputs: tuple[
            Float[Array, "chunk D"],
            Float[Array, "chunk F"],
            Int[Array, " chunk"],
            Int[Array, " chunk"],
        ],
    ) -> tuple[Array, Array, Array]:
        states, features, first, anchors = inputs
        logits = model.next_token_logits(states).astype(jnp.float32)
        drafted = logits[:, model.draft_tokens(choices)]
        of_model = entropy(jax.nn.log_softmax(drafted))[:, None]
        if model.block_size == 1:
            empty = jnp.zeros((states.shape[0], 0, width))
            return empty.astype(jnp.int32), empty, of_model
        candidates, log_probs, entropies = model.block_candidates(
            states,
            model.block_size,
            width,
            anchors,
            features,
            noise_along(model, key, first, options),
        )
        entropies = jnp.concatenate([of_model, entropies], axis=1)
        return candidates, log_probs, entropies

    chunks = jax.tree.map(
        lambda array: array.reshape(count // CHUNK, CHUNK, *array.shape[1:]),
        (hidden, for_heads, places, certain),
    )
    candidates, log_probs, entropies = (
        array.reshape(count, *array.shape[2:])
        for array in jax.lax.map(chunk_outputs, chunks)
    )
    return candidates, log_probs, entropies, for_drafter, certain


def assemble(
    texts: Sequence[RecordedText], sizes: tuple[int, int] | None = None
) -> Recording:
    """Stacks recorded texts.

    Args:
      texts: recorded texts of one model, with equal numbers of candidates.
      sizes: S and N; by default the smallest possible.
    """
    slots, positions = sizes or padded_sizes(texts)
    tokens = [np.concatenate([text.input_ids, text.output_ids]) for text in texts]
    drafts = RecordedDrafts(
        starts=jnp.asarray([len(text.input_ids) - 1 for text in texts], jnp.int32),
        candidates=stack_padded([text.candidates for text in texts], positions),
        log_probs=stack_padded([text.log_probs for text in texts], positions),
        entropies=stack_padded([text.entropies[:, 1:] for text in texts], positions),
    )
    return Recording(stack_padded(tokens, slots), drafts)
