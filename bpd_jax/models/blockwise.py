"""The blockwise language model: a trunk and L heads on its final hidden state.

Head 1 is the language model itself; head j predicts the token j steps ahead (paper
section 4, appendix C.2). All heads share the model's softmax, unless heads 2 … L have
their own softmax or vocabulary.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.models import products
from bpd_jax.models.attention import WholeTexts
from bpd_jax.models.block_heads import BlockHeads, apply_head
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.transformer import Transformer
from bpd_jax.models.transformer_config import ComputeConfig

_DEFAULT = ComputeConfig()


class BlockwiseLM(nn.Module):
    """A language model whose L heads predict the next L tokens from one hidden state.

    Attributes:
      compute: memory and speed options; with `scan_layers`, parameters are stacked.
      mesh: devices that rows and heads are sharded over, for flash attention.
    """

    config: BlockwiseConfig
    compute: ComputeConfig = _DEFAULT
    mesh: Mesh | None = None

    def setup(self) -> None:
        trunk, heads = self.config.trunk, self.config.heads
        self.trunk = Transformer(trunk, self.compute, self.mesh)
        if heads is not None and heads.num_ffns:
            self.heads = BlockHeads(heads, trunk, lambda: self.trunk.softmax_matrix)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"] | WholeTexts,
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
        layers: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B T D"], KeyValues, Float[Array, "B T F"]]:
        return self.trunk(tokens, positions, mask, cache, earlier, layers)

    def head_states(
        self,
        hidden: Float[Array, "... D"],
        embedded: Float[Array, "... D"] | None = None,
        features: Float[Array, "... F"] | None = None,
    ) -> Float[Array, "... L D"]:
        """The inputs of the softmax of every head; see `BlockHeads`."""
        heads = self.config.heads
        if heads is None or not heads.num_ffns:
            return hidden[..., None, :]
        return self.heads(hidden, embedded, features)

    def draft_logits(
        self, states: Float[Array, "... D"], level: int | Int[Array, ""] | None = None
    ) -> Float[Array, "... draft"]:
        """Logits of heads 2 … L over the draft vocabulary, float32.

        Args:
          level: j if all states belong to head j + 1; None if the second axis from the
            end runs over heads 2, 3, ….
        """
        heads = self.config.heads
        if heads is None or not heads.has_softmax:
            return self.trunk.logits(states)
        dtype = self.config.trunk.dtype
        if not heads.own_softmax:
            params = self.heads.variables["params"]
            return products.logits(params, self.heads.softmax, states, dtype)
        matrix = self.heads.softmax.astype(dtype)
        if level is None:
            matrix = matrix[: states.shape[-2]]
            logits = jnp.einsum("...LD,LVD->...LV", states, matrix)
        else:
            logits = jnp.einsum("...D,VD->...V", states, matrix[level - 1])
        return logits.astype(jnp.float32)

    def draft_tokens(self, indices: Int[Array, "..."]) -> Int[Array, "..."]:
        heads = self.config.heads
        if heads is None or heads.draft_vocabulary is None:
            return indices
        return self.heads.vocabulary[indices]

    def head_logits(
        self,
        hidden: Float[Array, "... D"],
        embedded: Float[Array, "... D"] | None = None,
        features: Float[Array, "... F"] | None = None,
    ) -> Float[Array, "... L V"]:
        """Logits of all heads, float32, for few positions at a time.

        For heads 2 … L, tokens outside the draft vocabulary have -inf.
        """
        states = self.head_states(hidden, embedded, features)
        first = self.trunk.logits(states[..., :1, :])
        if self.config.block_size == 1:
            return first
        rest = self.draft_logits(states[..., 1:, :])
        if rest.shape[-1] != first.shape[-1]:
            tokens = self.draft_tokens(jnp.arange(rest.shape[-1]))
            empty = jnp.full((*rest.shape[:-1], first.shape[-1]), -jnp.inf)
            rest = empty.at[..., tokens].set(rest)
        return jnp.concatenate([first, rest], axis=-2)

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Embeddings of tokens, without positions."""
        return self.trunk.embedding[tokens].astype(self.config.trunk.dtype)

    def next_token_logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Logits of head 1, the language model itself, float32."""
        heads = self.config.heads
        if heads is not None and heads.first_has_ffn:
            weights = {name: value[0] for name, value in self.heads.layers.items()}
            hidden = apply_head(heads, weights, hidden, dtype=self.config.trunk.dtype)
        return self.trunk.logits(hidden)

    def all_logits(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
    ) -> Float[Array, "B T L V"]:
        """Logits of all heads at all positions, for initialization and tests.

        Conditioned heads read y_0, the model's most probable next token.
        """
        heads, layers = self.config.heads, self.config.feature_layers
        hidden, _, features = self(tokens, positions, mask, layers=layers)
        self.initialize_drafter(features)
        if heads is None or not heads.is_conditioned:
            return self.head_logits(hidden)
        anchors = jnp.argmax(self.trunk.logits(hidden), axis=-1)
        return self.head_logits(hidden, self.embed(anchors), features)

    def initialize_drafter(self, features: Float[Array, "B T F"]) -> None:
        """Calls the drafter that is trained with the trunk; see `parameters`."""
