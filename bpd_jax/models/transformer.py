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

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.models import device_ops
from bpd_jax.models.attention import WholeTexts, capped
from bpd_jax.models.attention_layer import Attention
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.layers import PARTS, Experts, Projection, named_normal, norm
from bpd_jax.models.partitioning import (
    BATCH_SPEC,
    EMBED,
    LAYER,
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


@functools.partial(jax.jit, static_argnames=("config", "layer"))
def _run_block(
    config: TransformerConfig, layer: int, params: Params, *arguments: Any
) -> tuple[Array, tuple[KeyValues, Array]]:
    """Runs a `Block` with the parameters of its parts.

    It is traced once for all layers of a kind: their parameters are arguments.
    """
    parts = block_parts(config, lambda part: {"parent": None})
    block = Block(*parts, layer, parent=None)
    return block.apply({"params": params}, *arguments)


def remat_block(remat: str, *, in_scan: bool) -> Any:
    """`Block` with rematerialization according to `ComputeConfig.remat`."""
    if remat == "none":
        return Block
    policy = {
        "full": None,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }[remat]
    # Common subexpressions cannot be merged across the body of a scan.
    return nn.remat(Block, policy=policy, prevent_cse=not in_scan)


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
        if self.compute.scan_layers:
            self.layers = self._scanned()
        else:
            make = remat_block(self.compute.remat, in_scan=False)
            self.blocks = [
                make(*self._parts(layer), layer) for layer in range(config.num_layers)
            ]
        self.final_norm = norm(config, name="final_norm")

    def _layers(self) -> list[Params] | None:
        """In decoding, the parameters of each block for `_run_block`."""
        trained = self.mesh is not None or self.compute != ComputeConfig()
        if trained or self.is_initializing():
            return None
        params = self.variables["params"]
        return [
            {
                part: params[f"{part}_{layer}"]
                for part in PARTS
                if f"{part}_{layer}" in params
            }
            for layer in range(self.config.num_layers)
        ]

    def _scanned(self) -> Any:
        """A scan over all blocks, with stacked parameters; see `stack_layers`."""
        if not self.config.has_equal_layers:
            raise UserError(
                "ComputeConfig.scan_layers needs equal layers, but some of this model "
                "have a sliding window or no positions: set it to False."
            )
        scanned = nn.scan(
            remat_block(self.compute.remat, in_scan=True),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.config.num_layers,
            metadata_params={nn.PARTITION_NAME: LAYER},
        )
        return scanned(*self._parts())

    def _parts(self, layer: int | None = None) -> tuple[nn.Module | None, ...]:
        """The modules of a block; without a number they become its children."""

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

        def run_equal(params: Params, x: Array, *rest: Any) -> Any:
            return _run_block(config, 0, params, x, positions, mask, *rest)

        # ---- Embeddings ----
        # Rows are cast after the lookup: gradients are summed in the table's precision.
        x = self.embedding[tokens].astype(dtype) * config.embedding_scale
        if config.rotary is None:
            x += self.position_embedding[positions].astype(dtype)
        # The table is split along D. If x were too, every layer would exchange the
        # activations of all rows instead of its parameters.
        x = constrain(x, self.mesh, BATCH_SPEC)
        # ---- Blocks: by a scan of training, by a loop of the CPU, or in turn ----
        if self.compute.scan_layers:
            # Stacked parameters are used in training, which has no cache.
            assert cache is None
            assert earlier is None
            x, (new, outputs) = self.layers(x, positions, mask)
        elif looped := device_ops.current().loop_over_layers(
            config, run_equal, by_layer := self._layers(), x, cache, earlier
        ):
            x, (new, outputs) = looped
        else:
            results, numbers = [], range(config.num_layers)
            kinds = [(config.window_of(n), config.rotary_of(n)) for n in numbers]
            for layer in numbers:
                of_cache = None if cache is None else cache.of_layer(layer)
                of_drafts = jax.tree.map(lambda array, i=layer: array[i], earlier)
                run: Callable[..., Any]
                if by_layer is None:
                    run = self.blocks[layer]
                else:
                    # In decoding, layers of a kind share one traced function.
                    first = kinds.index(kinds[layer])
                    run = functools.partial(_run_block, config, first, by_layer[layer])
                x, result = run(x, positions, mask, of_cache, of_drafts)
                results.append(result)
            pairs, outputs = zip(*results, strict=True)
            new = jax.tree.map(lambda *layers: jnp.stack(layers), *pairs)
        # ---- What is read of the blocks, and the final norm ----
        features = [outputs[layer] for layer in layers] or [x[..., :0]]
        softmax = self.variables["params"].get(SOFTMAX)
        hidden = (
            device_ops.current()
            .operations(softmax, config.dtype)
            .norm(self.final_norm, x)
        )
        return hidden, new, jnp.concatenate(features, axis=-1)

    @property
    def softmax_matrix(self) -> Float[Array, "V D"] | StoredMatrix:
        """The matrix of the softmax; the embedding if they are tied."""
        return self.embedding if self.config.tied_softmax else self.softmax

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Logits, float32."""
        params = self.variables["params"]
        scores = logits(params, self.softmax_matrix, hidden, self.config.dtype)
        return capped(scores, self.config.logit_softcap)
