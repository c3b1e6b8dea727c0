"""Whether the devices are CPUs, and how their programs are compiled and kept."""

import functools
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from bpd_jax.cpu.tile import limit

COMPILER_OPTIONS: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}
"""Without XLA's newer emitters of elementwise code a decode loop compiles sooner."""

IN_ORDER: dict[str, Any] = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
}
"""Passes over whole texts hold few results in memory at a time. By default XLA begins
with all that can run at once, so that it expands the matrices of all layers and holds
them; short passes are faster with that default."""

# The platform of absent devices that this process compiles for.
_compiled_for: list[str] = []


def on_cpu(mesh: Mesh | None = None) -> bool:
    """Whether the devices of the mesh are CPUs; without one, those that jax uses."""
    if mesh is None:
        return (_compiled_for or [jax.default_backend()])[-1] == "cpu"
    return mesh.devices.flat[0].platform == "cpu"


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


def kernel_name(*parts: Any) -> str:
    """A name of letters, digits and underscores, which `kernels_of` finds.

    Code for other instructions has another name.
    """
    name = "_".join(["bpd_jax", *filter(None, [limit()]), *map(str, parts)])
    return re.sub(r"\W", "_", name)


def kernels_of(program: str) -> list[str]:
    """Names of the kernels that a lowered program calls."""
    module = sys.modules.get("bpd_jax.cpu.xla_kernel")
    called = set(re.findall(r"@(bpd_jax_\w+)", program))
    return sorted(called & set(module.registered())) if module else []


def load_kernels(names: Sequence[str]) -> bool:
    """Registers kernels whose machine code is on disk; whether all could be."""
    if not names:
        return True
    try:
        # Imported late: other devices do not need LLVM.
        from bpd_jax.cpu.xla_kernel import register
    except ImportError:
        return False
    return all(register(name) for name in names)
