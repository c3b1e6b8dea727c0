"""A blockwise model with its parameters, as decoding calls it."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.models import device_ops
from bpd_jax.models.attention import WholeTexts
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.cache import KeyValues, KVCache, empty_cache, spread
from bpd_jax.models.candidates import Perturbation, top_candidates
from bpd_jax.models.layers import is_stacked
from bpd_jax.models.products import StoredMatrix
from bpd_jax.models.transformer import Transformer
from bpd_jax.models.transformer_config import INT8, check_feature_layers


@flax.struct.dataclass
class Model:
    """A blockwise model: sizes and parameters. A pytree, whose sizes are static.

    Decoding calls what `DecodedModel` describes.

    Attributes:
      params: parameters; None for sizes alone, which are hashable, hence jit-static.
      cache_dtype: dtype of the cache; None for that of activations.
      mesh: devices that share the parameters, the rows of batches and the heads of the
        cache; None for one device.
    """

    config: BlockwiseConfig = flax.struct.field(pytree_node=False)
    params: Params | None = None
    cache_dtype: str | None = flax.struct.field(pytree_node=False, default=None)
    mesh: Mesh | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def sizes(self) -> "Model":
        return dataclasses.replace(self, params=None)

    def with_params(self, params: Params) -> "Model":
        return dataclasses.replace(self, params=params)

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def head_features(self) -> tuple[int, ...]:
        heads = self.config.heads
        return () if heads is None else heads.feature_layers

    @property
    def precision(self) -> str:
        """One of `PRECISIONS`: that of activations and products."""
        trunk = (self.params or {}).get("trunk", {})
        softmax = trunk.get("softmax", trunk.get("embedding"))
        rounds = isinstance(softmax, StoredMatrix) and softmax.rounds_operands
        return INT8 if rounds else self.config.trunk.dtype

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache, stacked if the layers of the parameters are."""
        trunk = (self.params or {}).get("trunk", {})
        sizes = self.config.trunk, batch, slots, self.cache_dtype
        cache = empty_cache(*sizes, stacked=is_stacked(trunk))
        return spread(cache, self.mesh)

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
        distinct = tuple(dict.fromkeys(layers))
        check_feature_layers(distinct, self.config.trunk.num_layers)
        assert self.params is not None
        trunk, params = Transformer(self.config.trunk, mesh=self.mesh), self.params
        inputs = tokens, positions, mask, cache, earlier, layers
        return trunk.apply({"params": params["trunk"]}, *inputs)

    def _apply(self, method: str, *arguments: Any) -> Any:
        module = BlockwiseLM(self.config, mesh=self.mesh)
        return module.apply({"params": self.params}, *arguments, method=method)

    def next_token_logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        return self._apply("next_token_logits", hidden)

    def greedy_tokens(self, hidden: Float[Array, "... D"]) -> Int[Array, "..."]:
        return device_ops.current().index_of_largest(self.next_token_logits(hidden))

    def states(self, hidden: Float[Array, "B D"]) -> Float[Array, "B D"]:
        return hidden

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        return self._apply("embed", tokens)

    def draft_logits(
        self,
        states: Float[Array, "... D"],
        level: int | Int[Array, ""] | None = None,
    ) -> Float[Array, "... draft"]:
        """Logits of heads 2 … L over the draft vocabulary; see `BlockwiseLM`."""
        return self._apply("draft_logits", states, level)

    def draft_tokens(self, indices: Int[Array, "..."]) -> Int[Array, "..."]:
        return self._apply("draft_tokens", indices)

    def block_candidates(
        self,
        hidden: Float[Array, "B D"],
        block_size: int,
        width: int,
        anchors: Int[Array, " B"] | None = None,
        features: Float[Array, "B F"] | None = None,
        perturb: Perturbation | None = None,
    ) -> tuple[Int[Array, "B L-1 W"], Float[Array, "B L-1 W"], Float[Array, "B L-1"]]:
        embedded = None if anchors is None else self.embed(anchors)
        states = self._apply("head_states", hidden, embedded, features)
        logits = self.draft_logits(states[:, 1:block_size])
        if perturb is not None and logits.shape[-1] < self.config.trunk.vocab_size:
            tokens = self.draft_tokens(jnp.arange(logits.shape[-1]))
            perturb = functools.partial(perturb, tokens=tokens)
        indices, log_probs, entropies = top_candidates(logits, width, perturb)
        return self.draft_tokens(indices), log_probs, entropies

    def head_logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... L V"]:
        return self._apply("head_logits", hidden)
