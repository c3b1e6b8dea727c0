"""The model as plain functions of parameters: what decoding calls."""

import dataclasses

from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.cache import KeyValues, KVCache, empty_cache
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.typing import Array, Bool, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class ModelFunctions:
    """A blockwise model without its parameters; hashable, hence jit-static.

    Decoding needs no more than these four methods and `block_size`, so any object
    that has them can be decoded.
    """

    config: BlockwiseConfig

    @property
    def block_size(self) -> int:
        """L, the number of heads."""
        return self.config.block_size

    def empty_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache of `slots` tokens per row."""
        return empty_cache(self.config.trunk, batch, slots)

    def forward(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
        cache: KVCache | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """Final hidden states of T new tokens, and their keys and values."""
        return BlockwiseLM(self.config).apply(
            {"params": params}, tokens, positions, mask, cache
        )

    def next_token_logits(
        self, params: Params, hidden: Float[Array, "... D"]
    ) -> Float[Array, "... V"]:
        """Logits of head 1, the language model itself."""
        return BlockwiseLM(self.config).apply(
            {"params": params}, hidden, method="next_token_logits"
        )

    def head_logits(
        self, params: Params, hidden: Float[Array, "... D"]
    ) -> Float[Array, "... L V"]:
        """Logits of all heads."""
        return BlockwiseLM(self.config).apply(
            {"params": params}, hidden, method="head_logits"
        )
