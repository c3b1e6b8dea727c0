"""Parts of the transformer's layers: initial values, projections, norms."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax

from bpd_jax.base.typing import Array
from bpd_jax.models import cpu
from bpd_jax.models.partitioning import EMBED
from bpd_jax.models.quantized import parameter
from bpd_jax.models.transformer_config import TransformerConfig

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}


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
