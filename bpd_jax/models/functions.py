"""The model as plain functions of parameters: what decoding calls."""

import dataclasses

import jax
import jax.numpy as jnp

from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.cache import KeyValues, KVCache, empty_cache
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.transformer_config import check_feature_layers
from bpd_jax.typing import Array, Bool, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class ModelFunctions:
    """A blockwise model without its parameters; hashable, hence jit-static.

    Decoding needs no more than these methods and `block_size`, so any object that has
    them can be decoded.

    Attributes:
      config: sizes.
      cache_dtype: of the cache; None for that of activations.
    """

    config: BlockwiseConfig
    cache_dtype: str | None = None

    @property
    def block_size(self) -> int:
        """L, the number of heads."""
        return self.config.block_size

    @property
    def head_features(self) -> tuple[int, ...]:
        """Layers whose outputs the block heads read; see `BlockHeadsConfig`."""
        heads = self.config.heads
        return () if heads is None else heads.feature_layers

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache of `slots` tokens per row."""
        return empty_cache(self.config.trunk, batch, slots, self.cache_dtype)

    def forward(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"],
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """Final hidden states of T new tokens, and their keys and values.

        See `Transformer` for the arguments.
        """
        return BlockwiseLM(self.config).apply(
            {"params": params}, tokens, positions, mask, cache, earlier
        )

    def forward_with_features(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"],
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
        *,
        layers: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B T D"], KeyValues, Float[Array, "B T F"]]:
        """As `forward`, and the outputs of `layers`, concatenated.

        F = len(layers) · D; without layers F is 0, and the call costs what `forward`
        costs. See `Transformer.with_features`.
        """
        check_feature_layers(layers, self.config.trunk.num_layers)
        return BlockwiseLM(self.config).apply(
            {"params": params},
            tokens,
            positions,
            mask,
            cache,
            earlier,
            layers,
            method="with_features",
        )

    def next_token_logits(
        self, params: Params, hidden: Float[Array, "... D"]
    ) -> Float[Array, "... V"]:
        """Logits of head 1, the language model itself."""
        return BlockwiseLM(self.config).apply(
            {"params": params}, hidden, method="next_token_logits"
        )

    def greedy_tokens(
        self, params: Params, hidden: Float[Array, "... D"]
    ) -> Int[Array, "..."]:
        """The language model's best next token."""
        logits = self.next_token_logits(params, hidden)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def states(
        self, params: Params, hidden: Float[Array, "B D"]
    ) -> Float[Array, "B D"]:
        """The hidden states themselves; a recording of a model looks them up."""
        del params
        return hidden

    def embed(self, params: Params, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Token embeddings, without positions."""
        return BlockwiseLM(self.config).apply(
            {"params": params}, tokens, method="embed"
        )

    def draft_logits(
        self,
        params: Params,
        states: Float[Array, "... D"],
        level: int | Int[Array, ""] | None = None,
    ) -> Float[Array, "... draft"]:
        """Logits of heads 2 … L over the draft vocabulary; see `BlockwiseLM`."""
        return BlockwiseLM(self.config).apply(
            {"params": params}, states, level, method="draft_logits"
        )

    def draft_tokens(
        self, params: Params, indices: Int[Array, "..."]
    ) -> Int[Array, "..."]:
        """Token ids of places in the draft vocabulary."""
        return BlockwiseLM(self.config).apply(
            {"params": params}, indices, method="draft_tokens"
        )

    def block_candidates(
        self,
        params: Params,
        hidden: Float[Array, "B D"],
        block_size: int,
        width: int,
        anchors: Int[Array, " B"] | None = None,
        features: Float[Array, "B F"] | None = None,
    ) -> tuple[Int[Array, "B L-1 W"], Float[Array, "B L-1 W"], Float[Array, "B L-1"]]:
        """The best tokens of heads 2 … `block_size`.

        Args:
          params: of the model.
          hidden: final hidden states of the last accepted tokens.
          block_size: heads to use, head 1 included.
          width: W.
          anchors: the certain tokens y_0, for heads with `reads_anchor`.
          features: outputs of the heads' `feature_layers` at the last accepted tokens.

        Returns:
          Tokens, best first; their log-probabilities over the draft vocabulary,
          float32; and the entropies of the heads, in nats.
        """
        embedded = None if anchors is None else self.embed(params, anchors)
        states = BlockwiseLM(self.config).apply(
            {"params": params}, hidden, embedded, features, method="head_states"
        )
        logits = self.draft_logits(params, states[:, 1:block_size])
        places, log_probs, entropies = top_candidates(logits, width)
        return self.draft_tokens(params, places), log_probs, entropies

    def head_logits(
        self, params: Params, hidden: Float[Array, "... D"]
    ) -> Float[Array, "... L V"]:
        """Logits of all heads."""
        return BlockwiseLM(self.config).apply(
            {"params": params}, hidden, method="head_logits"
        )


def top_candidates(
    logits: Float[Array, "... V"], width: int
) -> tuple[Int[Array, "... W"], Float[Array, "... W"], Float[Array, "..."]]:
    """The `width` best tokens, their log-probabilities, and the entropy in nats."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    # Behind the barrier: where a caller takes the first columns only, XLA would merge
    # the two slices, no longer see a top-k on a CPU, and sort the whole vocabulary.
    # (One barrier for both would lie on the top-k itself, which crashes XLA on a mesh.)
    scores, tokens = map(jax.lax.optimization_barrier, jax.lax.top_k(log_probs, width))
    return tokens.astype(jnp.int32), scores, entropy(log_probs)


def entropy(log_probs: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Entropy of distributions, in nats."""
    # 0 · log 0 is 0.
    terms = jnp.where(jnp.isneginf(log_probs), 0.0, jnp.exp(log_probs) * log_probs)
    return -terms.sum(-1)
