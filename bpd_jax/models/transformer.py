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
from jax.sharding import Mesh

from bpd_jax.models.attention import Segments, attention
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.compute import ComputeConfig
from bpd_jax.models.partitioning import (
    EMBED,
    HEADS,
    KV,
    LAYER,
    MLP,
    POSITION,
    VOCAB,
)
from bpd_jax.models.products import (
    DECODING_SOFTMAX,
    TRANSPOSED,
    decoding_product,
    product,
    times_rows,
    transposed_product,
)
from bpd_jax.models.rotary import rotate
from bpd_jax.models.segment_attention import segment_attention
from bpd_jax.models.transformer_config import TransformerConfig
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
        summed = len(self.axes) - len(self.bias_axes)
        if self.has_variable("params", TRANSPOSED):
            kernel = self.get_variable("params", TRANSPOSED)
            y = transposed_product(x, kernel, summed, dtype)
            y = y.reshape(*y.shape[:-1], *bias_shape)
        else:
            kernel = self.param("kernel", init, self.shape, param_dtype)
            y = product(x, kernel, summed, dtype)
        use_bias = self.config.use_bias if self.use_bias is None else self.use_bias
        if use_bias:
            init = named_zeros(self.bias_axes)
            y += self.param("bias", init, bias_shape, param_dtype).astype(dtype)
        return y


def norm(
    config: TransformerConfig, axis: str = EMBED, **place: Any
) -> nn.LayerNorm | nn.RMSNorm:
    """A norm in the model's precision; statistics are taken in float32.

    Args:
      config: of the trunk.
      axis: the name of the normalised axis.
      **place: `name` or `parent`, as every Linen module takes them.
    """
    shared: dict[str, Any] = {
        "epsilon": config.norm_epsilon,
        "dtype": config.dtype,
        "param_dtype": config.param_dtype,
        "scale_init": nn.with_logical_partitioning(nn.initializers.ones, (axis,)),
        **place,
    }
    if config.norm == "rms":
        return nn.RMSNorm(**shared)
    bias_init = named_zeros((axis,))
    return nn.LayerNorm(use_bias=config.use_bias, bias_init=bias_init, **shared)


class Attention(nn.Module):
    """Multi-head attention with an explicit cache."""

    config: TransformerConfig
    implementation: str = "auto"
    mesh: Mesh | None = None

    def setup(self) -> None:
        config = self.config
        width = config.head_width

        def projection(heads: int) -> Projection:
            return Projection(
                (config.d_model, heads, width),
                (EMBED, HEADS, KV),
                (HEADS, KV),
                config,
                use_bias=config.qkv_bias,
            )

        self.query = projection(config.num_heads)
        self.key = projection(config.kv_heads)
        self.value = projection(config.kv_heads)
        if config.query_key_norm:
            self.query_norm = norm(config, KV)
            self.key_norm = norm(config, KV)
        self.output = Projection(
            (config.num_heads, width, config.d_model),
            (HEADS, KV, EMBED),
            (EMBED,),
            config,
            # Residual branches start small, so that depth does not add variance.
            gain=(2 * config.num_layers) ** -0.5,
            use_bias=config.output_bias,
        )

    def keys_values(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Keys, with rotary positions applied, and values of some tokens."""
        keys, values = self.key(x), self.value(x)
        if self.config.query_key_norm:
            keys = self.key_norm(keys)
        if self.config.rotary is not None:
            keys = rotate(keys, positions, self.config.rotary)
        return keys, values

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Segments,
        cache: KVCache | None = None,
        layer: int = 0,
        earlier: KeyValues | None = None,
    ) -> tuple[Float[Array, "B T D"], Array, Array]:
        queries = self.query(x)
        if self.config.query_key_norm:
            queries = self.query_norm(queries)
        if self.config.rotary is not None:
            queries = rotate(queries, positions, self.config.rotary)
        keys, values = self.keys_values(x, positions)
        all_keys, all_values = keys, values
        if earlier is not None:
            all_keys = jnp.concatenate([earlier.keys[layer], keys], axis=1)
            all_values = jnp.concatenate([earlier.values[layer], values], axis=1)
        if isinstance(mask, Segments):
            assert cache is None
            assert earlier is None
            mixed = segment_attention(
                queries, keys, values, mask, self.implementation, self.mesh
            )
        elif cache is None:
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
                for_decoding=self.query.has_variable("params", TRANSPOSED),
            )
        return self.output(mixed), keys, values


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


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and beside a residual."""

    attention_norm: nn.Module
    attention: Attention
    mlp_norm: nn.Module
    mlp: FeedForward
    layer: int = 0

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Segments,
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[KeyValues, Float[Array, "B T D"]]]:
        """Runs the block.

        Returns:
          The residual stream after it; then what a scan over blocks stacks: the tokens'
          keys and values, and the same stream.
        """
        update, keys, values = self.attention(
            self.attention_norm(x), positions, mask, cache, self.layer, earlier
        )
        x += update
        x += self.mlp(self.mlp_norm(x))
        return x, (KeyValues(keys, values), x)


def block_parts(
    config: TransformerConfig,
    place: Callable[[str], dict[str, Any]],
    implementation: str = "auto",
    mesh: Mesh | None = None,
) -> tuple[nn.Module, Attention, nn.Module, FeedForward]:
    """The modules of a `Block`.

    Args:
      config: of the transformer.
      place: gives `name` or `parent` of the module of a part; see `norm`.
      implementation: see `ComputeConfig.attention`.
      mesh: devices that split rows and heads.
    """
    return (
        norm(config, **place("attention_norm")),
        Attention(config, implementation, mesh, **place("attention")),
        norm(config, **place("mlp_norm")),
        FeedForward(config, **place("mlp")),
    )


def remat_block(remat: str, *, in_scan: bool) -> Any:
    """`Block`, keeping for its gradient what `ComputeConfig.remat` says."""
    if remat == "none":
        return Block
    policy = {
        "full": None,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }[remat]
    # Nothing outside a loop's body can be merged with what it computes again.
    return nn.remat(Block, policy=policy, prevent_cse=not in_scan)


class Transformer(nn.Module):
    """Embeddings, pre-norm blocks, a final norm, a softmax."""

    config: TransformerConfig
    compute: ComputeConfig = ComputeConfig()
    mesh: Mesh | None = None

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
        if self.compute.scan_layers:
            self.layers = self._scanned()
        else:
            self.blocks = [self._block(layer) for layer in range(config.num_layers)]
        self.final_norm = norm(config, name="final_norm")

    def _block(self, layer: int) -> Block:
        """One block, whose parameters lie beside those of the others."""
        make = remat_block(self.compute.remat, in_scan=False)
        return make(*self._parts(lambda part: {"name": f"{part}_{layer}"}), layer)

    def _scanned(self) -> Any:
        """All blocks as one that runs `num_layers` times; see `stacking`."""
        scanned = nn.scan(
            remat_block(self.compute.remat, in_scan=True),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.config.num_layers,
            metadata_params={nn.PARTITION_NAME: LAYER},
        )
        # Parts without a parent become children of the block.
        return scanned(*self._parts(lambda part: {"parent": None}))

    def _parts(
        self, place: Callable[[str], dict[str, Any]]
    ) -> tuple[nn.Module, Attention, nn.Module, FeedForward]:
        return block_parts(self.config, place, self.compute.attention, self.mesh)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Segments,
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """Runs T new tokens.

        Args:
          tokens: ids.
          positions: of each token in the text.
          mask: what each token sees besides the cache; see `attention`. `Segments`,
            without a cache, are packed rows, and let `ComputeConfig.attention` choose.
          cache: the text before them.
          earlier: U - T draft tokens run before, which come first in `mask`.

        Returns:
          The final hidden states, and the new tokens' keys and values, which
          `commit` appends to the cache.
        """
        return self.with_features(tokens, positions, mask, cache, earlier)[:2]

    def with_features(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Segments,
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
        layers: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B T D"], KeyValues, Float[Array, "B T F"]]:
        """As `__call__`, and the residual stream after some layers.

        Args:
          tokens: see `__call__`, like `positions`, `mask`, `cache` and `earlier`.
          positions: likewise.
          mask: likewise.
          cache: likewise.
          earlier: likewise.
          layers: whose outputs to return, counted from 0; static.

        Returns:
          Final hidden states, keys and values, and the outputs of `layers` in this
          order, concatenated: F = len(layers) · D, without a norm.
        """
        dtype = self.config.dtype
        # Rows are cast, not the table: their gradients add up in its precision.
        x = self.embedding[tokens].astype(dtype)
        if self.config.rotary is None:
            x += self.position_embedding[positions].astype(dtype)
        if self.compute.scan_layers:
            # Stacked parameters are for training, which has no cache.
            assert cache is None
            assert earlier is None
            x, (new, outputs) = self.layers(x, positions, mask)
            features = [outputs[layer] for layer in layers] or [x[..., :0]]
            return self.final_norm(x), new, jnp.concatenate(features, axis=-1)
        by_layer, outputs = [], []
        for block in self.blocks:
            x, (new, output) = block(x, positions, mask, cache, earlier)
            by_layer.append(new)
            outputs.append(output)
        new = jax.tree.map(lambda *layers: jnp.stack(layers), *by_layer)
        features = [outputs[layer] for layer in layers] or [x[..., :0]]
        return self.final_norm(x), new, jnp.concatenate(features, axis=-1)

    @property
    def softmax_matrix(self) -> Float[Array, "V D"]:
        """The embedding, if the softmax is tied to it."""
        return self.embedding if self.config.tied_softmax else self.softmax

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """The softmax, tied to the embedding or not; float32."""
        dtype = self.config.dtype
        if self.has_variable("params", DECODING_SOFTMAX):
            matrix = self.get_variable("params", DECODING_SOFTMAX)
            return decoding_product(hidden, matrix, dtype).astype(jnp.float32)
        return times_rows(hidden, self.softmax_matrix, dtype).astype(jnp.float32)
