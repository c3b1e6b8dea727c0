"""Parts of the transformer's layers: initial values, projections, norms; stacking.

The parameters of the layers of a trunk are separate, or stacked for a scan over the
layers. Files and decoding use separate ones.

    attention_0/query/kernel [D,N,H], attention_1/query/kernel [D,N,H], …
    layers/attention/query/kernel [layers,D,N,H]
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Params, PyTree
from bpd_jax.models import cpu
from bpd_jax.models.partitioning import EMBED, LAYER
from bpd_jax.models.quantized import parameter
from bpd_jax.models.transformer_config import TransformerConfig

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}


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
        y = cpu.product(x, kernel, summed, dtype)
        y = y.reshape(*x.shape[: x.ndim - summed], *bias_shape)
        use_bias = self.config.use_bias if self.use_bias is None else self.use_bias
        if use_bias:
            init = named_zeros(self.bias_axes)
            y += self.param("bias", init, bias_shape, param_dtype).astype(dtype)
        return y


def apply_norm(norm: nn.LayerNorm | nn.RMSNorm, x: Array, *, rounds: bool) -> Array:
    """The norm of x; `rounds` says whether `cpu.rounds_activations` of its products."""
    if not rounds:
        return norm(x)
    params = norm.variables["params"]
    centred = isinstance(norm, nn.LayerNorm)
    return cpu.row_norm(
        x, params["scale"], params.get("bias"), norm.epsilon, centred=centred
    )


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
