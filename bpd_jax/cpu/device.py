"""The names of kernels in programs, by which they are found when programs are kept."""

import re
import sys
from collections.abc import Sequence
from typing import Any

from bpd_jax.cpu.tile import limit


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
