"""The tile size of the inner loops of the kernels, and storage of their matrices.

Kernels use the widest instructions of the processor. `--xla_cpu_max_isa` in `XLA_FLAGS`
limits them as it limits XLA, so that all of a process computes as on a smaller machine:
AVX2 for one without AVX-512, SSE4_2 for one without kernels.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import sys
from typing import Any

ARM = 4
"""The width of ARM's vectors."""

GROUPS = 4
"""Vectors of outputs that a chunk of a product has at least, for any processor."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of the operands of an inner loop, which must fit into registers.

    Attributes:
      width: W, number of elements of a vector register.
      outputs: vectors of slots that attention reads at once; a power of two.
      rows: queries that attend to them at once.
    """

    width: int
    outputs: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Storage:
    """How the numbers of an output lie in words of 32 bits, block by block.

    The integers of a block are followed by its scale and its minimum, in float32.

    Attributes:
      bits: 32 for float32, 16 for bfloat16, 8 and 4 for quantized numbers.
      block: numbers of a block; of floating-point numbers those of a word.
      offset: what is subtracted from unsigned integers: 0 or 128.
      minima: whether blocks have minima.
    """

    bits: int = 32
    block: int = 1
    offset: int = 0
    minima: bool = False

    @property
    def integers(self) -> int:
        """Words of the numbers of a block."""
        return self.block * self.bits // 32

    @property
    def scaled(self) -> bool:
        return self.bits < 16

    @property
    def words(self) -> int:
        """Words of a block."""
        return self.integers + self.scaled + self.minima

    @property
    def parts(self) -> int:
        """2 if the high halves of bytes hold the second half of a block."""
        return 2 if self.bits == 4 else 1

    @property
    def numbers(self) -> int:
        """Consecutive numbers of a part in a word."""
        return min(4, 32 // self.bits)


# What each value of the flag adds to the one before it: beginnings of LLVM's names.
_ADDED = {
    "SSE4_2": (),
    "AVX": ("avx", "f16c", "fma4", "xop"),
    "AVX2": ("avx2", "fma"),
    "AVX512": ("avx512", "evex512"),
    "AVX512_VNNI": ("avx512vnni", "avxvnni"),
    "AVX512_BF16": ("avx512bf16", "avx512fp16", "avx10"),
    "AMX": ("amx",),
}


def limit() -> str:
    """The value of `--xla_cpu_max_isa`; without one that bounds x86, an empty text."""
    flags = os.environ.get("XLA_FLAGS", "")
    values = re.findall(r"--xla_cpu_max_isa=(\w+)", flags)
    value = values[-1].upper() if values else ""
    return value if value in _ADDED else ""


def processor_features() -> Any:
    """LLVM's `FeatureMap` of this processor, up to the limit.

    Also says whether ARM multiplies integers, as `dotprod`.
    """
    return read_features(limit())


@functools.cache
def read_features(limit: str, about: str = "/proc/cpuinfo") -> Any:
    """See `processor_features`.

    LLVM does not ask Linux on ARM for `dotprod`, and macOS for nothing; all of Apple's
    processors have it.
    """
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    if is_arm():
        features["dotprod"] = sys.platform == "darwin"
        with contextlib.suppress(OSError):
            text = pathlib.Path(about).read_text(encoding="utf-8")
            features["dotprod"] |= "asimddp" in text.split()
    elif limit:
        levels = list(_ADDED)
        wider = levels[levels.index(limit) + 1 :]
        excluded = tuple(name for level in wider for name in _ADDED[level])
        for name in features:
            features[name] &= not name.startswith(excluded)
    return features


def is_arm() -> bool:
    from llvmlite import binding

    triple: str = binding.get_default_triple()
    return triple.startswith(("aarch64", "arm64"))


def tile_of_processor() -> Tile | None:
    """The tile for this processor, up to the limit of `XLA_FLAGS`.

    None if it lacks fused multiply-add, or LLVM.
    """
    try:
        # LLVM is imported late: other devices do not need it.
        features = processor_features()
    except ImportError:
        return None
    if sys.maxsize < 2**32:
        return None
    if features.get("avx512f"):
        return Tile(width=16, outputs=4, rows=6)
    if features.get("avx2") and features.get("fma"):
        return Tile(width=8, outputs=2, rows=4)
    if is_arm():
        return Tile(width=ARM, outputs=4, rows=4)
    return None
