"""The trunk: a decoder-only transformer as Linen modules.

What it holds, by `TransformerConfig`:

- the forms of GPT-2, Llama, Gemma, Qwen, Granite, OLMo and others: learned or rotary
  positions, RMS or layer norms before, after or around the layers, gated or plain
  feed-forward layers, experts, shared heads of keys, sliding windows, soft caps;
- one pass for training, prefill and verification: the cache is an argument, new keys
  and values are results, and a mask says what drafts see of one another;
- the outputs of chosen layers, which heads and drafters read;
- layers that are scanned, rematerialized, divided over a mesh, or run by one loop.

Modules have no collections besides `params`.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.models import device_ops
from bpd_jax.models.attention import WholeTexts, capped
from bpd_jax.models.attention_layer import Attention
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.layer_loop import run_layers
from bpd_jax.models.layers import (
    STACKED,
    Experts,
    Projection,
    named_normal,
    norm,
    separate_layers,
)
from bpd_jax.models.partitioning import (
    BATCH_SPEC,
    EMBED,
    MLP,
    POSITION,
    VOCAB,
    constrain,
)
from bpd_jax.models.products import SOFTMAX, StoredMatrix, logits, parameter
from bpd_jax.models.transformer_config import ComputeConfig, TransformerConfig

_POSITION_STDDEV = 0.02


class FeedForward(nn.Module):
    """One hidden layer, optionally gated."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config = self.config

        def project(name: str) -> Array:
            shape, axes = (config.d_model, config.d_ff), (EMBED, MLP)
            bias = config.mlp_bias
            return Projection(shape, axes, (MLP,), config, use_bias=bias, name=name)(x)

        output = self.get_variable("params", "output", {})
        operations = device_ops.current().operations(output.get("kernel"), config.dtype)
        hidden = project("input")
        gate = project("gate") if config.gated else None
        hidden = operations.activation(config.activation, hidden, gate)
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
    """A transformer block: attention and a feed-forward layer, with their norms.

    Norms of the inputs or of the outputs may be None; see
    `TransformerConfig.norm_place`.
    """

    attention_norm: nn.Module | None
    attention: Attention
    attention_output_norm: nn.Module | None
    mlp_norm: nn.Module | None
    mlp: nn.Module
    mlp_output_norm: nn.Module | None
    layer: int = 0

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"] | WholeTexts,
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[KeyValues, Float[Array, "B T D"]]]:
        """Runs the block.

        Returns:
          The residual stream after the block; and the values that a scan over blocks
          stacks: keys and values of the tokens, and the same residual stream.
        """

        operations = self.attention.operations

        def normed(norm: nn.Module | None, x: Array) -> Array:
            return x if norm is None else operations.norm(norm, x)

        scale = self.attention.config.residual_scale
        # ---- Attention, with residual ----
        z, mix = self.mixed("attention", normed(self.attention_norm, x))
        update, keys, values = self.attention(
            z, positions, mask, cache, self.layer, earlier
        )
        update = normed(self.attention_output_norm, mix(update))
        x = operations.add(x, scale, update)
        # ---- Feed-forward layer or experts, with residual ----
        z, mix = self.mixed("mlp", normed(self.mlp_norm, x))
        update = normed(self.mlp_output_norm, mix(self.mlp(z)))
        x = operations.add(x, scale, update)
        return x, (KeyValues(keys, values), x)

    def mixed(
        self, part: str, z: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Callable[[Array], Array]]:
        """The input of a layer, and what is applied to its output; see subclasses."""
        del part
        return z, lambda update: update


def block_parts(
    config: TransformerConfig,
    module_arguments: Callable[[str], dict[str, Any]],
    implementation: str = "auto",
    mesh: Mesh | None = None,
) -> tuple[nn.Module | None, ...]:
    """The modules of a `Block`; `module_arguments` returns their name or parent."""

    feed_forward = FeedForward if config.experts is None else Experts

    def norm_of(part: str, missing: str) -> nn.Module | None:
        if config.norm_place == missing:
            return None
        return norm(config, **module_arguments(part))

    return (
        norm_of("attention_norm", "after"),
        Attention(config, implementation, mesh, **module_arguments("attention")),
        norm_of("attention_output_norm", "before"),
        norm_of("mlp_norm", "after"),
        feed_forward(config, **module_arguments("mlp")),
        norm_of("mlp_output_norm", "before"),
    )


def _run_block(
    block: Block, remat: str, in_loop: bool, params: Params, *arguments: Any
) -> tuple[Array, tuple[KeyValues, Array]]:
    """Runs a `Block` without parameters with those of its parts.

    `remat` is `ComputeConfig.remat`.
    """

    def run(params: Params, *arguments: Any) -> Any:
        return block.apply({"params": params}, *arguments)

    if remat != "none":
        policy = {
            "full": None,
            "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        }[remat]
        # Common subexpressions cannot be merged across the body of a loop.
        run = jax.checkpoint(run, policy=policy, prevent_cse=not in_loop)
    return run(params, *arguments)


class Transformer(nn.Module):
    """Embeddings, blocks, a final norm, a softmax."""

    config: TransformerConfig
    compute: ComputeConfig = ComputeConfig()
    mesh: Mesh | None = None

    def setup(self) -> None:
        config = self.config

        def table(name: str, axis: str, rows: int, stddev: float) -> Array:
            init = named_normal((axis, EMBED), stddev)
            shape = rows, config.d_model
            return parameter(self, name, init, shape, config.param_dtype)

        tokens = VOCAB, config.vocab_size, config.d_model**-0.5
        self.embedding = table("embedding", *tokens)
        if config.rotary is None:
            self.position_embedding = table(
                "position_embedding", POSITION, config.max_length, _POSITION_STDDEV
            )
        if not config.tied_softmax:
            self.softmax = table("softmax", *tokens)
        if self.is_initializing():
            self.blocks = [
                Block(*self._parts(layer), layer) for layer in range(config.num_layers)
            ]
        self.final_norm = norm(config, name="final_norm")

    def _parts(self, layer: int | None = None) -> tuple[nn.Module | None, ...]:
        """The modules of a block, which with a number become children of this one."""

        def arguments(part: str) -> dict[str, Any]:
            return {"parent": None} if layer is None else {"name": f"{part}_{layer}"}

        return block_parts(self.config, arguments, self.compute.attention, self.mesh)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"] | WholeTexts,
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
        layers: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B T D"], KeyValues, Float[Array, "B T F"]]:
        """Runs T new tokens.

        Args:
          mask: the tokens that each token attends to, besides the cache; see
            `attention`. `Segments` describe packed rows without a cache, for which
            `ComputeConfig.attention` chooses the implementation.
          earlier: keys and values of U - T draft tokens that were run before, which
            come first in `mask`.
          layers: layers whose outputs are returned, counted from 0; static.

        Returns:
          The final hidden states; keys and values of the new tokens, which `commit`
          appends to the cache; and the outputs of `layers` in this order (the residual
          stream without a norm), concatenated: F = len(layers) · D.
        """
        config, dtype = self.config, self.config.dtype
        # ---- Embeddings ----
        # Rows are cast after the lookup: gradients are summed in the table's precision.
        x = self.embedding[tokens].astype(dtype) * config.embedding_scale
        if config.rotary is None:
            x += self.position_embedding[positions].astype(dtype)
        # The table is split along D. If x were too, every layer would exchange the
        # activations of all rows instead of its parameters.
        x = constrain(x, self.mesh, BATCH_SPEC)
        # ---- Blocks: all layers go through one loop ----
        x, new, features = self._run_layers(
            x, positions, mask, cache, earlier, tuple(dict.fromkeys(layers))
        )
        # ---- What is read of the blocks, and the final norm ----
        read = [features[layer] for layer in layers] or [x[..., :0]]
        softmax = self.variables["params"].get(SOFTMAX)
        hidden = (
            device_ops.current()
            .operations(softmax, config.dtype)
            .norm(self.final_norm, x)
        )
        return hidden, new, jnp.concatenate(read, axis=-1)

    def _run_layers(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"] | WholeTexts,
        cache: KVCache | None,
        earlier: KeyValues | None,
        read: tuple[int, ...],
    ) -> tuple[Float[Array, "B T D"], KeyValues, dict[int, Float[Array, "B T D"]]]:
        """The outputs of the last layer and of those of `read`; see `__call__`."""
        config, remat = self.config, self.compute.remat
        kinds = [
            (config.window_of(layer), config.rotary_of(layer))
            for layer in range(config.num_layers)
        ]
        layers: Any
        if self.is_initializing():
            layers = self.blocks
        else:
            params = self.variables["params"]
            layers = params.get(STACKED)
            if layers is None:
                layers = separate_layers(params, config.num_layers)
        in_loop = isinstance(layers, dict)
        # Layers of a kind share one traced function; their parameters are arguments.
        # It is one of this call, since what surrounds it may change how it is traced.
        traced = jax.jit(_run_block, static_argnums=(0, 1, 2))
        blocks: dict[int, Block] = {}

        def run(
            first: int,
            of_layer: Any,
            x: Array,
            cache: KVCache | None,
            earlier: KeyValues | None,
        ) -> tuple[Array, KeyValues]:
            if isinstance(of_layer, Block):
                x, (pair, _) = of_layer(x, positions, mask, cache, earlier)
                return x, pair
            if first not in blocks:
                blocks[first] = Block(*self._parts(), first, parent=None)
            arguments = of_layer, x, positions, mask, cache, earlier
            x, (pair, _) = traced(blocks[first], remat, in_loop, *arguments)
            return x, pair

        x, new, outputs = run_layers(run, kinds, layers, x, cache, earlier, read)
        return x, new, dict(zip(read, outputs, strict=True))

    @property
    def softmax_matrix(self) -> Float[Array, "V D"] | StoredMatrix:
        """The matrix of the softmax; the embedding if they are tied."""
        return self.embedding if self.config.tied_softmax else self.softmax

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Logits, float32."""
        params = self.variables["params"]
        scores = logits(params, self.softmax_matrix, hidden, self.config.dtype)
        return capped(scores, self.config.logit_softcap)
