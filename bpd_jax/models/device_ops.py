"""What a model computes in another way on some devices, as XLA compiles it anywhere.

A package `bpd_jax.PLATFORM`, if there is one, registers a subclass of `DeviceOps` when
it is imported, which is done here when programs for such devices are traced. Nothing
else imports it, and everything works without it, though more slowly.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.models.attention import Attended, attention
from bpd_jax.models.cache import KVCache
from bpd_jax.models.prefix_attention import prefix_attention
from bpd_jax.models.rotary import RotaryConfig, rotate
from bpd_jax.models.transformer_config import TransformerConfig

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}

COMPILER_OPTIONS: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}
"""Without XLA's newer emitters of elementwise code a decode loop compiles sooner."""

IN_ORDER: dict[str, Any] = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
}
"""Passes over whole texts hold few results in memory at a time. By default XLA begins
with all that can run at once, so that it expands the matrices of all layers and holds
them; short passes are faster with that default."""

# By platform, those of this process.
_REGISTERED: dict[str, "DeviceOps"] = {}

# The platform of absent devices that this process compiles for.
_compiled_for: list[str] = []


def on_cpu(mesh: Mesh | None = None) -> bool:
    """Whether the devices of the mesh are CPUs; without one, those that jax uses."""
    if mesh is None:
        return _platform() == "cpu"
    return mesh.devices.flat[0].platform == "cpu"


def _platform() -> str:
    return (_compiled_for or [jax.default_backend()])[-1]


def compile_for(platform: str) -> None:
    """From now on, all programs of this process are compiled for other devices."""
    _compiled_for.append(platform)


def compiler_options(*, in_order: bool = False) -> dict[str, Any] | None:
    """Options on a CPU, of those that this version of XLA has; None on other devices.

    `in_order` is whether `IN_ORDER` is one of them.
    """
    if not on_cpu():
        return None
    options = {**COMPILER_OPTIONS, **(IN_ORDER if in_order else {})}
    return {name: value for name, value in options.items() if _has(name, value)}


@functools.cache
def _has(option: str, value: Any) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile({option: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


class Before(NamedTuple):
    """What T new tokens of a layer attend to before them; see `prefix_attention`."""

    cache: KVCache | None
    positions: Int[Array, "B T"]
    window: int | None = None
    softcap: float | None = None
    mesh: Mesh | None = None


class Operations:
    """What a layer computes besides products with matrices, as XLA compiles it.

    Attention may be a kernel of a GPU. `DeviceOps.operations` chooses between these and
    those of a device, by how the matrices of the layer are stored.
    """

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


_PLAIN = Operations()


class DeviceOps:
    """As XLA compiles it on every device."""

    # ---- Choosing tokens ----

    def index_of_largest(self, logits: Float[Array, "... V"]) -> Int[Array, "..."]:
        """`argmax` of numbers without NaN over the last axis: the first of equals."""
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def largest(
        self, logits: Float[Array, "... V"], count: int
    ) -> tuple[Float[Array, "... W"], Int[Array, "... W"]]:
        """`jax.lax.top_k` of numbers without NaN, of which more than W are finite."""
        values, indices = jax.lax.top_k(logits, count)
        return values, indices

    # ---- Layers ----

    def operations(self, kernel: Any, dtype: str) -> Operations:
        """The operations of a layer with this kernel, or before the softmax's matrix.

        `dtype` is that of activations.
        """
        return _PLAIN

    def for_one_loop(
        self,
        layers: Sequence[Params],
        x: Float[Array, "B T D"],
        cache: KVCache | None,
    ) -> tuple[Params, Any] | None:
        """Equal layers, which are apart, for one loop (`layer_loop`).

        Args:
          layers: their parameters.
          x: the input of the first one.

        Returns:
          The parameters in one tree: of `Packed` kernels those of all layers, other
          arrays stacked; and the cache, of which `of_layer` returns that of a layer.
          None where a loop would copy layers, so that they run one after the other.
        """
        return None

    # ---- A model made ready for decoding; see `decoding_parameters` ----

    def layout(self, params: Params, dtype: str, *, exact: bool) -> Params:
        """Parameters on one device, stored as it reads them fastest.

        `dtype` is that of activations, `exact` whether the results of products must
        stay the same.
        """
        return params

    def check_integers(self, trunk: TransformerConfig) -> None:
        """Checks that integers can be multiplied here and in a model of these sizes."""
        raise UserError(
            "precision=int8 needs a CPU with AVX2, AVX-512 or ARM's products of "
            "integers: only there are the texts of all methods equal."
        )

    def integer_layout(self, params: Params) -> Params:
        """The quantized parameters of a trunk as integer products read them.

        `check_integers` accepts the model.
        """
        raise NotImplementedError

    def cache_dtype(self, precision: str, width: int) -> str | None:
        """The dtype of the cache; None for that of activations.

        `precision` is one of `PRECISIONS`, `width` is H.
        """
        return None

    def multiplies_quantized(self, precision: str | None) -> bool:
        """Whether products expand quantized matrices at no cost, to equal results."""
        return False

    # ---- Programs ----

    def kernels_of(self, program: str) -> list[str]:
        """Names of the kernels of our own that a lowered program calls."""
        return []

    def load_kernels(self, names: Sequence[str]) -> bool:
        """Registers kernels whose machine code is on disk; whether all could be."""
        return not names


def register(platform: str, ops: DeviceOps) -> None:
    """Uses `ops` in programs for devices of this platform."""
    _REGISTERED[platform] = ops


def current() -> DeviceOps:
    """Those of the devices that programs are now traced for."""
    platform = _platform()
    if platform not in _REGISTERED:
        package = f"bpd_jax.{platform}"
        if importlib.util.find_spec(package):
            importlib.import_module(package)
        _REGISTERED.setdefault(platform, DeviceOps())
    return _REGISTERED[platform]
