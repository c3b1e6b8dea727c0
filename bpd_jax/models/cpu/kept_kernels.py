"""Kernels of programs that are loaded without tracing."""

import re
import sys
from collections.abc import Sequence


def kernels_of(program: str) -> list[str]:
    """Names of the kernels that a lowered program calls."""
    module = sys.modules.get("bpd_jax.models.cpu.xla_kernel")
    called = set(re.findall(r"@(bpd_jax_\w+)", program))
    return sorted(called & set(module.registered())) if module else []


def load_kernels(names: Sequence[str]) -> bool:
    """Registers kernels whose machine code is on disk; whether all could be."""
    if not names:
        return True
    try:
        # Imported late: other devices do not need LLVM.
        from bpd_jax.models.cpu.xla_kernel import register
    except ImportError:
        return False
    return all(register(name) for name in names)
