"""The tile size of the inner loops of the kernels, and storage of their matrices."""

import contextlib
import dataclasses
import functools
import pathlib
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


@functools.cache
def processor_features(about: str = "/proc/cpuinfo") -> Any:
    """LLVM's `FeatureMap` of this processor, and whether ARM multiplies integers.

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
    return features


def is_arm() -> bool:
    from llvmlite import binding

    triple: str = binding.get_default_triple()
    return triple.startswith(("aarch64", "arm64"))


@functools.cache
def tile_of_processor() -> Tile | None:
    """The tile for this processor; None if it lacks fused multiply-add, or LLVM."""
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
