"""The blockwise language model: a trunk and L heads on its final hidden state.

Head 1 is the language model itself; head j predicts the token j steps ahead (paper
section 4, appendix C.2). Every head ends in the softmax tied to the embedding.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.partitioning import (
    BLOCK_HEAD,
    EMBED,
    MLP,
    parameter_shardings,
    unbox,
)
from bpd_jax.models.transformer import (
    ACTIVATIONS,
    Transformer,
    named_normal,
    named_zeros,
)
from bpd_jax.typing import Array, Bool, Float, Int, Params, PyTree


class BlockHeads(nn.Module):
    """The heads' feed-forward layers, their parameters stacked along the first axis."""

    config: BlockHeadsConfig
    d_model: int
    dtype: str
    param_dtype: str

    def setup(self) -> None:
        count, hidden, width = self.config.num_ffns, self.config.hidden, self.d_model
        sizes = {BLOCK_HEAD: count, EMBED: width, MLP: hidden}

        def parameter(name: str, init: Callable[..., Any], *axes: str) -> Array:
            shape = tuple(sizes[axis] for axis in axes)
            return self.param(name, init(axes), shape, self.param_dtype)

        fan_in = functools.partial(named_normal, stddev=width**-0.5)
        self.weights = {
            "kernel_in": parameter("kernel_in", fan_in, BLOCK_HEAD, EMBED, MLP),
            "bias_in": parameter("bias_in", named_zeros, BLOCK_HEAD, MLP),
            # Zero, so that a new head starts as the language model's own softmax.
            "kernel_out": parameter("kernel_out", named_zeros, BLOCK_HEAD, MLP, EMBED),
            "bias_out": parameter("bias_out", named_zeros, BLOCK_HEAD, EMBED),
        }

    def __call__(self, hidden: Float[Array, "... D"]) -> Float[Array, "... L D"]:
        """The state of every head, to be fed to the tied softmax."""
        apply = functools.partial(apply_head, self.config, dtype=self.dtype)
        states = jax.vmap(apply, in_axes=(0, None), out_axes=-2)(self.weights, hidden)
        if self.config.first_has_ffn:
            return states
        return jnp.concatenate([hidden[..., None, :], states], axis=-2)


def apply_head(
    config: BlockHeadsConfig,
    weights: Params,
    hidden: Float[Array, "... D"],
    *,
    dtype: str,
) -> Float[Array, "... D"]:
    """One head's feed-forward layer, with that head's slice of the stacked weights."""
    w = {name: value.astype(dtype) for name, value in weights.items()}
    inner = ACTIVATIONS[config.activation](hidden @ w["kernel_in"] + w["bias_in"])
    state = inner @ w["kernel_out"] + w["bias_out"]
    return hidden + state if config.residual else state


class BlockwiseLM(nn.Module):
    """A language model whose `L` heads guess the next `L` tokens from one state."""

    config: BlockwiseConfig

    def setup(self) -> None:
        trunk, heads = self.config.trunk, self.config.heads
        self.trunk = Transformer(trunk)
        if heads is not None and heads.num_ffns:
            self.heads = BlockHeads(
                heads, trunk.d_model, trunk.dtype, trunk.param_dtype
            )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"],
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """Final hidden states and new keys and values; see `Transformer`."""
        return self.trunk(tokens, positions, mask, cache, earlier)

    def head_states(self, hidden: Float[Array, "... D"]) -> Float[Array, "... L D"]:
        """The input of the softmax of every head."""
        heads = self.config.heads
        if heads is None or not heads.num_ffns:
            return hidden[..., None, :]
        return self.heads(hidden)

    def head_logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... L V"]:
        """Logits of every head, float32: meant for one position at a time."""
        return self.trunk.logits(self.head_states(hidden))

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Embeddings of tokens, without positions."""
        return self.trunk.embedding.astype(self.config.trunk.dtype)[tokens]

    def softmax_logits(self, states: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """The tied softmax applied to the states of any head, float32."""
        return self.trunk.logits(states)

    def next_token_logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Logits of head 1, the language model itself, float32."""
        heads = self.config.heads
        if heads is not None and heads.first_has_ffn:
            weights = {name: value[0] for name, value in self.heads.weights.items()}
            hidden = apply_head(heads, weights, hidden, dtype=self.config.trunk.dtype)
        return self.trunk.logits(hidden)

    def all_logits(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
    ) -> Float[Array, "B T L V"]:
        """Every head at every position: for initialisation, tests and small models."""
        return self.head_logits(self.trunk(tokens, positions, mask)[0])


def init_boxed(config: BlockwiseConfig, rng: Array) -> PyTree:
    """Initial parameters, still in Linen's boxes with their logical axis names."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    mask = jnp.ones((1, 1, 1), bool)
    method = BlockwiseLM.all_logits
    return BlockwiseLM(config).init(rng, tokens, tokens, mask, method=method)["params"]


def init_parameters(
    config: BlockwiseConfig, rng: Array, mesh: jax.sharding.Mesh
) -> Params:
    """Initial parameters, created in place on the devices that `mesh` assigns.

    The values do not depend on the mesh.
    """
    init = functools.partial(init_boxed, config)
    shardings = parameter_shardings(jax.eval_shape(init, rng), mesh)
    return jax.jit(lambda key: unbox(init(key)), out_shardings=shardings)(rng)


def parameter_shapes(config: BlockwiseConfig) -> Params:
    """Shapes and dtypes of the parameters; nothing is allocated."""
    return unbox(
        jax.eval_shape(functools.partial(init_boxed, config), jax.random.key(0))
    )


def count_parameters(config: BlockwiseConfig) -> dict[str, int]:
    """Number of parameters of each part: embedding, positions, blocks, heads, total."""
    counts = {"embedding": 0, "positions": 0, "blocks": 0, "heads": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameter_shapes(config)):
        names = [entry.key for entry in path]
        if names[0] == "heads":
            part = "heads"
        elif names[1] == "embedding":
            part = "embedding"
        elif names[1] == "position_embedding":
            part = "positions"
        else:
            part = "blocks"
        counts[part] += int(np.prod(leaf.shape))
    return {**counts, "total": sum(counts.values())}
