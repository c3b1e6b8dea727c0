"""Parts of the transformer's layers: projections, norms, experts; stacked layers.

The parameters of the layers of a trunk are separate, or stacked for a loop over the
layers. Files have separate ones; `stacked_layers` stacks them for decoding.

    attention_0/query/kernel [D,N,H], attention_1/query/kernel [D,N,H], …
    layers/attention/query/kernel [layers,D,N,H]
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int, Params, PyTree
from bpd_jax.models.device_ops import ACTIVATIONS, on_cpu
from bpd_jax.models.partitioning import (
    EMBED,
    EXPERT,
    LAYER,
    MLP,
)
from bpd_jax.models.products import parameter, product
from bpd_jax.models.transformer_config import TransformerConfig

# The modules of a block, in the order of `transformer.Block`.
PARTS = (
    *("attention_norm", "attention", "attention_output_norm"),
    *("mlp_norm", "mlp", "mlp_output_norm"),
)
STACKED = "layers"


def named_normal(axes: Sequence[str | None], stddev: float) -> Callable[..., Array]:
    """A normal initializer with logical axis names."""
    return nn.with_logical_partitioning(nn.initializers.normal(stddev), tuple(axes))


def named_zeros(axes: Sequence[str | None]) -> Callable[..., Array]:
    """A zero initializer with logical axis names."""
    return nn.with_logical_partitioning(nn.initializers.zeros, tuple(axes))


class Projection(nn.Module):
    """`tensordot(x, kernel) + bias`, where the bias has the axes of the output.

    The product sums over the last axes of x and the first axes of the kernel, in the
    same order, so that neither is transposed.
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
        kernel = parameter(self, "kernel", init, self.shape, param_dtype)
        y = product(x, kernel, summed, dtype)
        y = y.reshape(*x.shape[: x.ndim - summed], *bias_shape)
        use_bias = self.config.use_bias if self.use_bias is None else self.use_bias
        if use_bias:
            init = named_zeros(self.bias_axes)
            y += self.param("bias", init, bias_shape, param_dtype).astype(dtype)
        return y


def norm(
    config: TransformerConfig,
    axes: tuple[str, ...] = (EMBED,),
    **module_arguments: Any,
) -> nn.LayerNorm | nn.RMSNorm:
    """A norm in the model's precision, with statistics in float32.

    `axes` are the names of the normalised axes, the last ones; `module_arguments` are
    `name` or `parent` of the Linen module.
    """
    numbers = tuple(range(-len(axes), 0))
    shared: dict[str, Any] = {
        "reduction_axes": numbers,
        "feature_axes": numbers,
        "epsilon": config.norm_epsilon,
        "dtype": config.dtype,
        "param_dtype": config.param_dtype,
        "scale_init": nn.with_logical_partitioning(nn.initializers.ones, axes),
        **module_arguments,
    }
    if config.norm == "rms":
        return nn.RMSNorm(**shared)
    bias_init = named_zeros(axes)
    return nn.LayerNorm(use_bias=config.use_bias, bias_init=bias_init, **shared)


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
        mix = _one_by_one if on_cpu() else _grouped
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


def is_stacked(trunk: Params) -> bool:
    """Whether its layers are stacked."""
    return STACKED in trunk


def stack_layers(trunk: Params, num_layers: int) -> Params:
    """Stacks the layers of a trunk, which may be in Linen's boxes, under `layers`."""
    layers = {
        part: _stack([trunk[f"{part}_{layer}"] for layer in range(num_layers)])
        for part in PARTS
        if f"{part}_0" in trunk
    }
    names = {f"{part}_{layer}" for part in PARTS for layer in range(num_layers)}
    rest = {name: value for name, value in trunk.items() if name not in names}
    return {**rest, STACKED: layers}


def unstack_layers(trunk: Params) -> Params:
    """The inverse of `stack_layers`, for arrays without boxes."""
    rest = {name: value for name, value in trunk.items() if name != STACKED}
    for part, stacked in trunk[STACKED].items():
        for layer in range(len(jax.tree.leaves(stacked)[0])):
            rest[f"{part}_{layer}"] = jax.tree.map(lambda x, i=layer: x[i], stacked)
    return rest


def _stack(layers: list[PyTree]) -> Any:
    def stack(*arrays: Any) -> Any:
        first = arrays[0]
        if not isinstance(first, nn.meta.AxisMetadata):
            return jnp.stack(arrays)
        stacked = first.replace(value=jnp.stack([box.value for box in arrays]))
        return stacked.add_axis(0, {nn.PARTITION_NAME: LAYER})

    return jax.tree.map(
        stack, *layers, is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata)
    )


def separate_layers(trunk: Params, num_layers: int) -> list[Params]:
    """The parameters of each layer, by part."""
    return [
        {part: trunk[f"{part}_{layer}"] for part in PARTS if f"{part}_{layer}" in trunk}
        for layer in range(num_layers)
    ]
