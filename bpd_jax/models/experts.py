"""Mixtures of experts: feed-forward layers of which a token uses a few (Qwen3-MoE)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float
from bpd_jax.models.layers import ACTIVATIONS, Projection, named_normal
from bpd_jax.models.partitioning import EMBED, EXPERT, MLP
from bpd_jax.models.transformer_config import TransformerConfig


class Experts(nn.Module):
    """E gated feed-forward layers; a router weighs k of them for each token.

    Parameters are router/kernel [D, E], input_experts and gate_experts [E, D, F], and
    output_experts [E, F, D], without biases. The router has no loss of its own.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config = self.config
        assert config.experts is not None
        count, chosen = config.experts, config.chosen_experts
        width, inner = config.d_model, config.d_ff

        def experts(name: str, *sizes: int) -> Float[Array, "E in out"]:
            axes = (MLP, EMBED) if name.startswith("output") else (EMBED, MLP)
            init = named_normal((EXPERT, *axes), sizes[0] ** -0.5)
            weights = self.param(name, init, (count, *sizes), config.param_dtype)
            return weights.astype(config.dtype)

        router = Projection(
            (width, count),
            (EMBED, EXPERT),
            (EXPERT,),
            config,
            use_bias=False,
            name="router",
        )
        tokens = x.reshape(-1, width)
        shares = jax.nn.softmax(router(tokens).astype(jnp.float32))
        shares, numbers = jax.lax.top_k(shares, chosen)
        if config.normalised_experts:
            shares /= shares.sum(-1, keepdims=True)
        # The rows of each expert are consecutive.
        order = jnp.argsort(numbers.ravel(), stable=True)
        sizes = jnp.bincount(numbers.ravel(), length=count).astype(jnp.int32)

        def product(x: Float[Array, "n in"], name: str, *shape: int) -> Array:
            return jax.lax.ragged_dot(x, experts(name, *shape), sizes)

        rows = tokens[order // chosen]
        hidden = ACTIVATIONS[config.activation](
            product(rows, "input_experts", width, inner)
        )
        hidden *= product(rows, "gate_experts", width, inner)
        rows = product(hidden, "output_experts", inner, width)
        outputs = jnp.zeros_like(rows).at[order].set(rows)
        outputs = outputs.reshape(-1, chosen, width)
        mixed = (outputs * shares[..., None].astype(outputs.dtype)).sum(1)
        return mixed.reshape(x.shape)
