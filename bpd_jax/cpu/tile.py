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


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of the operands of an inner loop, which must fit into registers.

    Attributes:
      width: W, number of elements of a vector register.
      outputs: number of rows of the matrix, or of vectors of slots; a power of two.
      rows: number of rows of x, or of queries.
    """

    width: int
    outputs: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Storage:
    """How the numbers of a matrix lie in memory, row by row.

    Attributes:
      bits: 32 for float32, 16 for bfloat16; 8 and 4 for a `QuantizedMatrix`.
      block: numbers of a block with one scale; 0 for floating-point numbers.
      minima: whether blocks have minima.
    """

    bits: int = 32
    block: int = 0
    minima: bool = False

    @property
    def arrays(self) -> int:
        return 1 + bool(self.block) + self.minima

    def step(self, width: int) -> int:
        """Numbers that are read at once into vectors of `width`."""
        return self.block or width

    def nbytes(self, numbers: int) -> int:
        return numbers * self.bits // 8


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
