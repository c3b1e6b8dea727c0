"""The attention layer of the transformer, a Linen module."""

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.models import device_ops
from bpd_jax.models.attention import WholeTexts, near
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.device_ops import Before, Operations
from bpd_jax.models.layers import Projection, norm
from bpd_jax.models.partitioning import EMBED, HEADS, KV
from bpd_jax.models.transformer_config import TransformerConfig


class Attention(nn.Module):
    """Multi-head attention with an explicit cache, that of its layer.

    Attributes:
      inputs: width of its inputs; None is D.
    """

    config: TransformerConfig
    implementation: str = "auto"
    mesh: Mesh | None = None
    inputs: int | None = None

    def setup(self) -> None:
        config = self.config
        width = config.head_width

        def projection(heads: int) -> Projection:
            return Projection(
                (self.inputs or config.d_model, heads, width),
                (EMBED, HEADS, KV),
                (HEADS, KV),
                config,
                use_bias=config.qkv_bias,
            )

        self.query = projection(config.num_heads)
        self.key = projection(config.kv_heads)
        self.value = projection(config.kv_heads)
        if config.query_key_norm:
            axes = (HEADS, KV) if config.joint_query_key_norm else (KV,)
            self.query_norm = norm(config, axes)
            self.key_norm = norm(config, axes)
        self.output = Projection(
            (config.num_heads, width, config.d_model),
            (HEADS, KV, EMBED),
            (EMBED,),
            config,
            # Scaled by depth, so that the variance of the residual stream is bounded.
            gain=(2 * config.num_layers) ** -0.5,
            use_bias=config.output_bias,
        )

    @property
    def operations(self) -> Operations:
        """Those of a layer whose matrices are stored as these are."""
        kernel = self.query.get_variable("params", "kernel")
        return device_ops.current().operations(kernel, self.config.dtype)

    def keys_values(
        self, x: Float[Array, "B T I"], positions: Int[Array, "B T"], layer: int = 0
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Keys (with rotary positions) and values."""
        keys, values = self.key(x), self.value(x)
        if self.config.query_key_norm:
            keys = self.operations.norm(self.key_norm, keys)
        rotary = self.config.rotary_of(layer)
        if rotary is not None:
            keys = self.operations.rotate(keys, positions, rotary)
        return keys, values

    def __call__(
        self,
        x: Float[Array, "B T I"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"] | WholeTexts,
        cache: KVCache | None = None,
        layer: int = 0,
        earlier: KeyValues | None = None,
    ) -> tuple[Float[Array, "B T D"], Array, Array]:
        config, operations = self.config, self.operations
        queries = self.query(x)
        if config.query_key_norm:
            queries = operations.norm(self.query_norm, queries)
        rotary = config.rotary_of(layer)
        if rotary is not None:
            queries = operations.rotate(queries, positions, rotary)
        if config.attention_scale is not None:
            # Attention itself multiplies by H^-0.5.
            queries *= config.attention_scale * config.head_width**0.5
        keys, values = self.keys_values(x, positions, layer)
        all_keys, all_values = keys, values
        if earlier is not None:
            all_keys = jnp.concatenate([earlier.keys, keys], axis=1)
            all_values = jnp.concatenate([earlier.values, values], axis=1)
        window, softcap = config.window_of(layer), config.attention_softcap
        slots = 0 if cache is None else cache.slots
        if window is not None and slots + all_keys.shape[1] <= window:
            window = None  # All tokens are within one window.
        if isinstance(mask, WholeTexts):
            assert cache is None
            assert earlier is None
            mixed = mask.attend(
                queries,
                keys,
                values,
                self.implementation,
                self.mesh,
                window,
                softcap,
            )
        else:
            if window is not None:
                mask = _within(window, mask, positions)
            before = Before(cache, positions, window, softcap, self.mesh)
            new = queries, all_keys, all_values, mask
            mixed = operations.attention(*new, before)
        return self.output(mixed), keys, values


def _within(
    window: int,
    mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"],
    positions: Int[Array, "B T"],
) -> Array:
    """The mask of the new tokens within a sliding window.

    Keys of drafts that ran before have no positions here: they are in the same block,
    which is shorter than any window.
    """
    groups = positions if mask.ndim == 3 else positions.reshape(mask.shape[:3])
    length = groups.shape[-1]
    inside = mask[..., -length:] & near(groups, groups, window)
    return jnp.concatenate([mask[..., :-length], inside], axis=-1)
