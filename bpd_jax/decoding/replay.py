"""Replay: decode known texts again by other methods, without running the model.

With the text fixed, block efficiency depends on nothing but what each method drafts at
each position, and that on the heads' lattice there. One pass over the texts records the
lattices; a `RecordedModel` then plays the model's part in the very loop that decodes,
by looking up what it said. Every method, weight, width and number of drafts follows at
the price of its drafting. (Not lookahead, which asks the model about other texts.)
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.assets import Assets
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.typing import Array, Bool, Float, Int, Params, PyTree

# Positions whose logits of all heads exist at the same time.
_CHUNK = 32


@flax.struct.dataclass
class Recording:
    """What a model says along R texts of up to S tokens.

    Attributes:
      tokens: prompt and text.
      candidates, log_probs, entropies: of heads 2 … L after every token; see
        `ModelFunctions.block_candidates`.
      hidden: final hidden states, or None if they were not asked for.
      params: the model's parameters where hidden states are kept, for drafters that
        use its embedding and softmax.
    """

    tokens: Int[Array, "R S"]
    candidates: Int[Array, "R S L-1 W"]
    log_probs: Float[Array, "R S L-1 W"]
    entropies: Float[Array, "R S L-1"]
    hidden: Float[Array, "R S D"] | None = None
    params: Params | None = None


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
        self, params: Recording, hidden: Int[Array, "B 2"], block_size: int, width: int
    ) -> tuple[Array, Array, Array]:
        """What was recorded there."""
        row, place = hidden[:, 0], hidden[:, 1]
        heads = block_size - 1
        return (
            params.candidates[row, place, :heads, :width],
            params.log_probs[row, place, :heads, :width],
            params.entropies[row, place, :heads],
        )

    def states(self, params: Recording, hidden: Int[Array, "B 2"]) -> Array:
        """The hidden states that were recorded."""
        assert params.hidden is not None
        return params.hidden[hidden[:, 0], hidden[:, 1]]

    def embed(self, params: Recording, tokens: Array) -> Array:
        """Token embeddings of the model itself."""
        return ModelFunctions(self.config).embed(params.params, tokens)

    def draft_logits(self, params: Recording, states: Array, level: int) -> Array:
        """The model's own, over its draft vocabulary."""
        return ModelFunctions(self.config).draft_logits(params.params, states, level)

    def draft_tokens(self, params: Recording, indices: Array) -> Array:
        """Token ids of places in the model's draft vocabulary."""
        return ModelFunctions(self.config).draft_tokens(params.params, indices)


@dataclasses.dataclass(frozen=True)
class Replay:
    """Texts with what the model said along them.

    Attributes:
      texts: what was decoded, one per prompt.
      recording: what the model said.
      model: answers from it.
      assets: what methods draft with.
      options: how far the texts were decoded.
      token_bytes: the model's, for stop texts; see `Decoder`.
    """

    texts: tuple[Generation, ...]
    recording: Recording
    model: RecordedModel
    assets: Assets
    options: DecodeOptions
    token_bytes: Callable[[], Sequence[bytes]] | None = None

    def decoder(self, *, width: int = 16, alpha: float = 1.0) -> Decoder:
        """Decodes from the recording; see `Decoder` for the arguments.

        Raises:
          UserError: fewer candidates were recorded than `width`.
        """
        if width > self.model.width:
            raise UserError(
                f"{self.model.width} candidates per head were recorded: give a "
                f"lattice_width of at most that, not {width}."
            )
        # It has the methods of `ModelFunctions` that decoding calls.
        model: PyTree = self.model
        return Decoder(
            model,
            self.recording,
            width=width,
            alpha=alpha,
            assets=self.assets,
            token_bytes=self.token_bytes,
        )

    def decode(
        self, method: Method, decoder: Decoder | None = None
    ) -> list[Generation]:
        """What decoding by `method` would do: same drafts, same calls, same tokens.

        Only which draft won a text's last call may differ, where that depends on what
        would follow the end. `seconds` are those of drafting alone.

        Args:
          method: any but lookahead; its `k` at most what was recorded.
          decoder: from `decoder()`, to be used again.
        """
        check_replayable(method)
        if method.k is not None and method.k > self.model.width:
            raise UserError(
                f"{method.name} asks for {method.k} candidates per head, but "
                f"{self.model.width} were recorded."
            )
        if method.kind in ("hydra", "recurrent") and self.recording.hidden is None:
            raise UserError(f"{method.name} needs a recording with hidden states.")
        decoder = decoder or self.decoder(width=self.model.width)
        prompts = [text.input_ids for text in self.texts]
        reference = self.texts if method.kind == "oracle" else None
        return decoder.decode(method, prompts, self.options, reference=reference)

    def accuracies(
        self, ranks: int = 10, least: int = 1
    ) -> tuple[tuple[float, ...], ...]:
        """How often the candidate of each rank of heads 2 … L is the right token.

        Args:
          ranks: candidates of each head that are looked at.
          least: tokens that every head must have guessed.

        Raises:
          UserError: the texts are too few or too short for that.
        """
        candidates = np.asarray(self.recording.candidates)[..., :ranks]
        tokens = np.asarray(self.recording.tokens)
        found = []
        for head in range(candidates.shape[2]):
            hits, count = np.zeros(candidates.shape[3]), 0
            for row, text in enumerate(self.texts):
                # After token t, head h + 2 predicts token t + h + 2.
                begin = len(text.input_ids) - 1
                end = len(text.input_ids) + len(text.output_ids) - head - 2
                end = max(end, begin)  # a text too short for this head
                right = tokens[row, begin + head + 2 : end + head + 2, None]
                hits += (candidates[row, begin:end, head] == right).sum(0)
                count += end - begin
            if count < least:
                raise UserError(
                    f"head {head + 2} could guess only {count} tokens of the texts, "
                    f"fewer than {least}: decode more of them, or longer ones."
                )
            found.append(tuple((hits / count).tolist()))
        return tuple(found)


def check_replayable(method: Method) -> None:
    """Raises a `UserError` for lookahead."""
    if method.kind == "lookahead":
        raise UserError("lookahead cannot be replayed: it asks the model itself.")


def record(
    decoder: Decoder,
    texts: Sequence[Generation],
    options: DecodeOptions,
    *,
    width: int | None = None,
    keep_hidden: bool = False,
) -> Replay:
    """Runs the model once over decoded texts.

    Args:
      decoder: the model that wrote them.
      texts: what it decoded, by whatever method.
      options: with which it did; greedy ones.
      width: candidates kept per head, at most the draft vocabulary; by default
        the decoder's.
      keep_hidden: also keep hidden states, for hydra and recurrent.

    Raises:
      UserError: the texts were not decoded greedily, or there are none.
    """
    if options.temperature != 0 or not texts:
        raise UserError("replay needs at least one text that was decoded greedily.")
    model = decoder.model
    width = min(width or decoder.width, model.config.draft_vocab_size)
    lengths = [len(text.input_ids) + len(text.output_ids) for text in texts]
    slots = -(-max(lengths) // _CHUNK) * _CHUNK
    tokens = np.zeros((len(texts), slots), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : lengths[row]] = np.concatenate([text.input_ids, text.output_ids])
    # On the host in between: a replay runs on one device, wherever the model was.
    rows = [
        jax.device_get(_record_row(model, decoder.params, jnp.asarray(row), width))
        for row in tokens
    ]
    candidates, log_probs, entropies, hidden = (
        jnp.asarray(np.stack(parts)) for parts in zip(*rows, strict=True)
    )
    recording = Recording(
        jnp.asarray(tokens),
        candidates,
        log_probs,
        entropies,
        hidden if keep_hidden else None,
        decoder.params if keep_hidden else None,
    )
    everything = dataclasses.replace(options, batch_size=len(texts))
    recorded = RecordedModel(model.config, width)
    return Replay(
        tuple(texts),
        recording,
        recorded,
        decoder.assets,
        everything,
        decoder.token_bytes,
    )


@functools.partial(jax.jit, static_argnames=("model", "width"))
def _record_row(
    model: ModelFunctions, params: Params, tokens: Int[Array, " S"], width: int
) -> tuple[Array, Array, Array, Array]:
    """What the model says after every token of one text."""
    positions = jnp.arange(tokens.shape[0])[None]
    mask = causal_mask(jnp.ones_like(positions))
    hidden = model.forward(params, tokens[None], positions, mask)[0][0]
    if model.block_size == 1:
        nothing = jnp.zeros((tokens.shape[0], 0, width))
        return nothing.astype(jnp.int32), nothing, nothing[..., 0], hidden

    def some(states: Float[Array, "chunk D"]) -> tuple[Array, Array, Array]:
        return model.block_candidates(params, states, model.block_size, width)

    chunks = hidden.reshape(-1, _CHUNK, hidden.shape[-1])
    found = jax.lax.map(some, chunks)
    flat = (array.reshape(-1, *array.shape[2:]) for array in found)
    candidates, log_probs, entropies = flat
    return candidates, log_probs, entropies, hidden
