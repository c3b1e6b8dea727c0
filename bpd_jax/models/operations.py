"""What the layers of a transformer compute besides products with matrices.

`DeviceOps.operations` chooses for each layer, by how its matrices are stored, between
these and those by kernels of a device.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.models.attention import Attended, attention
from bpd_jax.models.cache import KVCache
from bpd_jax.models.prefix_attention import prefix_attention
from bpd_jax.models.rotary import RotaryConfig, rotate

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}


class Before(NamedTuple):
    """What T new tokens of a layer attend to before them; see `prefix_attention`."""

    cache: KVCache | None
    positions: Int[Array, "B T"]
    window: int | None = None
    softcap: float | None = None
    mesh: Mesh | None = None


class Operations:
    """The operations as XLA compiles them; and attention by a kernel of a GPU."""

    def norm(self, norm: nn.LayerNorm | nn.RMSNorm, x: Array) -> Array:
        return norm(x)

    def activation(
        self, name: str, x: Float[Array, "... F"], gate: Float[Array, "... F"] | None
    ) -> Float[Array, "... F"]:
        """An activation of x, times the gate if there is one."""
        activated = ACTIVATIONS[name](x)
        return activated if gate is None else activated * gate

    def rotate(
        self, x: Float[Array, "B T N H"], positions: Int[Array, "B T"], by: RotaryConfig
    ) -> Float[Array, "B T N H"]:
        return rotate(x, positions, by)

    def add(self, x: Array, scale: float, update: Array) -> Array:
        return x + scale * update

    def attention(
        self,
        queries: Float[Array, "B T N H"],
        keys: Float[Array, "B U K H"],
        values: Float[Array, "B U K H"],
        mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"],
        to: Before,
    ) -> Float[Array, "B T N H"]:
        """`attention` to new tokens and to what is before them."""
        prefix = None if to.cache is None else functools.partial(self.read, to=to)
        return attention(queries, keys, values, mask, prefix, to.softcap)

    def read(self, queries: Float[Array, "B K M H"], to: Before) -> Attended:
        """`prefix_attention` to the cache."""
        assert to.cache is not None
        keys, values = to.cache.keys[0], to.cache.values[0]
        return prefix_attention(queries, keys, values, to.cache.lengths, *to[1:])
