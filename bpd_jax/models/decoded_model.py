"""What decoding calls of a model: `Model`, or `RecordedModel` in a replay."""

from typing import Protocol

from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.models.attention import WholeTexts
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.candidates import Perturbation


class DecodedModel(Protocol):
    """A model as decoding calls it; a pytree, whose sizes are static."""

    # ---- Sizes ----

    @property
    def block_size(self) -> int:
        """L, the number of heads."""

    @property
    def head_features(self) -> tuple[int, ...]:
        """Layers whose outputs the block heads read (`BlockHeadsConfig`)."""

    @property
    def mesh(self) -> Mesh | None:
        """Devices that share the model and rows of batches; None for one device."""

    # ---- A pass over tokens, and what is read of its hidden states ----

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        """A cache without tokens."""

    def forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"] | WholeTexts,
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
        *,
        layers: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B T D"], KeyValues, Float[Array, "B T F"]]:
        """Final hidden states of T new tokens, their keys and values, and features.

        Features are the outputs of `layers`, which may be repeated, concatenated:
        F = len(layers) · D. See `Transformer.__call__` for the arguments.
        """

    def greedy_tokens(self, hidden: Float[Array, "... D"]) -> Int[Array, "..."]:
        """The language model's best next token."""

    def next_token_logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Logits of the next token, float32."""

    # ---- Block heads ----

    def block_candidates(
        self,
        hidden: Float[Array, "B D"],
        block_size: int,
        width: int,
        anchors: Int[Array, " B"] | None = None,
        features: Float[Array, "B F"] | None = None,
        perturb: Perturbation | None = None,
    ) -> tuple[Int[Array, "B L-1 W"], Float[Array, "B L-1 W"], Float[Array, "B L-1"]]:
        """The best tokens of heads 2 … `block_size`.

        `anchors` are the certain tokens y_0, for heads with `reads_anchor`; `features`
        the outputs of the heads' `feature_layers` at the last accepted tokens;
        `perturb` is for `top_candidates`.

        Returns:
          Tokens, best first; their log-probabilities over the draft vocabulary,
          float32; and the entropies of the heads, in nats.
        """

    # ---- What drafters read: hidden states, embeddings, the draft vocabulary ----

    def states(self, hidden: Float[Array, "B D"]) -> Float[Array, "B D"]:
        """The hidden states themselves; `RecordedModel` looks them up."""

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Embeddings of tokens, without positions."""

    def draft_logits(
        self, states: Float[Array, "... D"], level: int
    ) -> Float[Array, "... draft"]:
        """Logits of head `level` + 1 over the draft vocabulary."""

    def draft_tokens(self, indices: Int[Array, "..."]) -> Int[Array, "..."]:
        """Token ids of indices into the draft vocabulary."""
