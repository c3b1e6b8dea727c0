"""The trunk: a decoder-only transformer as Linen modules.

Only `params` is used: the cache goes in as an argument and new keys and values
come out as a result, so the same module serves training, prefill and verification.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bpd_jax.models.attention import attention
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.config import TransformerConfig
from bpd_jax.models.partitioning import EMBED, HEADS, KV, MLP, POSITION, VOCAB
from bpd_jax.models.rotary import rotate
from bpd_jax.typing import Array, Bool, Float, Int

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}

_POSITION_STDDEV = 0.02


def named_normal(axes: Sequence[str], stddev: float) -> Callable[..., Array]:
    """A normal initializer whose parameter carries logical axis names."""
    return nn.with_logical_partitioning(nn.initializers.normal(stddev), tuple(axes))


def named_zeros(axes: Sequence[str]) -> Callable[..., Array]:
    """A zero initializer whose parameter carries logical axis names."""
    return nn.with_logical_partitioning(nn.initializers.zeros, tuple(axes))


class Projection(nn.Module):
    """`tensordot(x, kernel) + bias`, where the bias has the output's axes.

    The last axes of x meet the first of the kernel in the same order, so that both are
    multiplied as they lie in memory.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    bias_axes: tuple[str, ...]
    config: TransformerConfig
    gain: float = 1.0
    use_bias: bool | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        dtype, param_dtype = self.config.dtype, self.config.param_dtype
        sizes = dict(zip(self.axes, self.shape, strict=True))
        bias_shape = tuple(sizes[axis] for axis in self.bias_axes)
        fan_in = math.prod(self.shape) / math.prod(bias_shape)
        init = named_normal(self.axes, self.gain * fan_in**-0.5)
        kernel = self.param("kernel", init, self.shape, param_dtype)
        summed = len(self.axes) - len(self.bias_axes)
        y = jnp.tensordot(x, kernel.astype(dtype), axes=summed)
        use_bias = self.config.use_bias if self.use_bias is None else self.use_bias
        if use_bias:
            init = named_zeros(self.bias_axes)
            y += self.param("bias", init, bias_shape, param_dtype).astype(dtype)
        return y


def norm(
    config: TransformerConfig, name: str, axis: str = EMBED
) -> nn.LayerNorm | nn.RMSNorm:
    """A norm in the model's precision; statistics are taken in float32."""
    shared: dict[str, Any] = {
        "epsilon": config.norm_epsilon,
        "dtype": config.dtype,
        "param_dtype": config.param_dtype,
        "scale_init": nn.with_logical_partitioning(nn.initializers.ones, (axis,)),
        "name": name,
    }
    if config.norm == "rms":
        return nn.RMSNorm(**shared)
    bias_init = named_zeros((axis,))
    return nn.LayerNorm(use_bias=config.use_bias, bias_init=bias_init, **shared)


class Attention(nn.Module):
    """Multi-head attention with an explicit cache."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"],
        cache: KVCache | None,
        layer: int,
        earlier: KeyValues | None = None,
    ) -> tuple[Float[Array, "B T D"], Array, Array]:
        config = self.config
        width = config.head_width

        def project(name: str, heads: int) -> Array:
            return Projection(
                (config.d_model, heads, width),
                (EMBED, HEADS, KV),
                (HEADS, KV),
                config,
                use_bias=config.qkv_bias,
                name=name,
            )(x)

        queries = project("query", config.num_heads)
        keys = project("key", config.kv_heads)
        values = project("value", config.kv_heads)
        if config.query_key_norm:
            queries = norm(config, "query_norm", KV)(queries)
            keys = norm(config, "key_norm", KV)(keys)
        if config.rotary is not None:
            queries, keys = (
                rotate(x, positions, config.rotary) for x in (queries, keys)
            )
        all_keys, all_values = keys, values
        if earlier is not None:
            all_keys = jnp.concatenate([earlier.keys[layer], keys], axis=1)
            all_values = jnp.concatenate([earlier.values[layer], values], axis=1)
        if cache is None:
            mixed = attention(queries, all_keys, all_values, mask)
        else:
            mixed = attention(
                queries,
                all_keys,
                all_values,
                mask,
                cache.keys[layer],
                cache.values[layer],
                cache.lengths,
            )
        output = Projection(
            (config.num_heads, width, config.d_model),
            (HEADS, KV, EMBED),
            (EMBED,),
            config,
            # Residual branches start small, so that depth does not add variance.
            gain=(2 * config.num_layers) ** -0.5,
            use_bias=config.output_bias,
            name="output",
        )(mixed)
        return output, keys, values


class FeedForward(nn.Module):
    """One hidden layer, optionally gated."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config = self.config

        def widen(name: str) -> Array:
            shape, axes = (config.d_model, config.d_ff), (EMBED, MLP)
            bias = config.mlp_bias
            return Projection(shape, axes, (MLP,), config, use_bias=bias, name=name)(x)

        hidden = ACTIVATIONS[config.activation](widen("input"))
        if config.gated:
            hidden *= widen("gate")
        return Projection(
            (config.d_ff, config.d_model),
            (MLP, EMBED),
            (EMBED,),
            config,
            gain=(2 * config.num_layers) ** -0.5,
            use_bias=config.mlp_bias,
            name="output",
        )(hidden)


class Transformer(nn.Module):
    """Embeddings, pre-norm blocks, a final norm, a softmax."""

    config: TransformerConfig

    def setup(self) -> None:
        config = self.config
        self.embedding = self.param(
            "embedding",
            named_normal((VOCAB, EMBED), config.d_model**-0.5),
            (config.vocab_size, config.d_model),
            config.param_dtype,
        )
        if config.rotary is None:
            self.position_embedding = self.param(
                "position_embedding",
                named_normal((POSITION, EMBED), _POSITION_STDDEV),
                (config.max_length, config.d_model),
                config.param_dtype,
            )
        if not config.tied_softmax:
            self.softmax = self.param(
                "softmax",
                named_normal((VOCAB, EMBED), config.d_model**-0.5),
                (config.vocab_size, config.d_model),
                config.param_dtype,
            )
        layers = range(config.num_layers)
        self.attention_norms = [norm(config, f"attention_norm_{i}") for i in layers]
        self.attentions = [Attention(config, name=f"attention_{i}") for i in layers]
        self.mlp_norms = [norm(config, f"mlp_norm_{i}") for i in layers]
        self.mlps = [FeedForward(config, name=f"mlp_{i}") for i in layers]
        self.final_norm = norm(config, "final_norm")

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"],
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """Runs T new tokens.

        Args:
          tokens: ids.
          positions: of each token in the text.
          mask: what each token sees besides the cache; see `attention`.
          cache: the text before them.
          earlier: U - T draft tokens run before, which come first in `mask`.

        Returns:
          The final hidden states, and the new tokens' keys and values, which
          `commit` appends to the cache.
        """
        dtype = self.config.dtype
        x = self.embedding.astype(dtype)[tokens]
        if self.config.rotary is None:
            x += self.position_embedding.astype(dtype)[positions]
        new_keys, new_values = [], []
        for layer in range(self.config.num_layers):
            update, keys, values = self.attentions[layer](
                self.attention_norms[layer](x), positions, mask, cache, layer, earlier
            )
            x += update
            x += self.mlps[layer](self.mlp_norms[layer](x))
            new_keys.append(keys)
            new_values.append(values)
        new = KeyValues(jnp.stack(new_keys), jnp.stack(new_values))
        return self.final_norm(x), new

    @property
    def softmax_matrix(self) -> Float[Array, "V D"]:
        """The embedding, if the softmax is tied to it."""
        return self.embedding if self.config.tied_softmax else self.softmax

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """The softmax, tied to the embedding or not; float32."""
        matrix = self.softmax_matrix.astype(self.config.dtype)
        return jnp.einsum("...D,VD->...V", hidden, matrix).astype(jnp.float32)
