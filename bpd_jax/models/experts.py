"""Mixtures of experts: feed-forward layers of which a token uses a few (Qwen3-MoE)."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.models import cpu
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
        kernels = (
            experts("input_experts", width, inner),
            experts("gate_experts", width, inner),
            experts("output_experts", inner, width),
        )
        mix = _one_by_one if cpu.on_cpu() else _grouped
        activation = ACTIVATIONS[config.activation]
        mixed = mix(tokens, shares.astype(x.dtype), numbers, kernels, activation)
        return mixed.reshape(x.shape)


def _grouped(
    tokens: Float[Array, "T D"],
    shares: Float[Array, "T k"],
    numbers: Int[Array, "T k"],
    kernels: tuple[Array, ...],
    activation: Callable[[Array], Array],
) -> Float[Array, "T D"]:
    """One product for all experts, whose rows are consecutive."""
    chosen = numbers.shape[1]
    order = jnp.argsort(numbers.ravel(), stable=True)
    sizes = jnp.bincount(numbers.ravel(), length=len(kernels[0])).astype(jnp.int32)

    def product(x: Float[Array, "n in"], kernel: Float[Array, "E in out"]) -> Array:
        return jax.lax.ragged_dot(x, kernel, sizes)

    rows = tokens[order // chosen]
    rows = product(_gated(product, rows, kernels, activation), kernels[2])
    outputs = jnp.zeros_like(rows).at[order].set(rows)
    return (outputs.reshape(*shares.shape, -1) * shares[..., None]).sum(1)


def _one_by_one(
    tokens: Float[Array, "T D"],
    shares: Float[Array, "T k"],
    numbers: Int[Array, "T k"],
    kernels: tuple[Array, ...],
    activation: Callable[[Array], Array],
) -> Float[Array, "T D"]:
    """All tokens through each expert that any of them chose.

    XLA expands `ragged_dot` on a CPU to products of all experts at once, which repeat
    the tokens for each of them.
    """
    rows = jnp.arange(len(tokens))[:, None]
    weights = jnp.zeros((len(tokens), len(kernels[0])), shares.dtype)
    weights = weights.at[rows, numbers].set(shares)

    def add(expert: Int[Array, ""], mixed: Array) -> Array:
        def with_expert() -> Array:
            own = tuple(kernel[expert] for kernel in kernels)
            update = _gated(jnp.matmul, tokens, own, activation) @ own[2]
            return mixed + update * weights[:, expert, None]

        chosen = (weights[:, expert] != 0).any()
        return jax.lax.cond(chosen, with_expert, lambda: mixed)

    return jax.lax.fori_loop(0, len(kernels[0]), add, jnp.zeros_like(tokens))


def _gated(
    product: Callable[[Array, Array], Array],
    x: Float[Array, "n D"],
    kernels: tuple[Array, ...],
    activation: Callable[[Array], Array],
) -> Float[Array, "n F"]:
    return activation(product(x, kernels[0])) * product(x, kernels[1])
