"""Blocks of GGUF tensors as quantized matrices, without expanding them.

The layouts are those of llama.cpp's `ggml-common.h`. Every type here has values of
float32 `scale · integer + minimum`, whose product is exact: the scale has at most 18
significant bits and the integer 6, or 11 and 8. They are therefore rounded as the
package gguf rounds them, also in a fused multiply-add.
"""

from collections.abc import Callable

import gguf
import numpy as np

from bpd_jax.models.quantized import QuantizedMatrix, pack

# Integers, scales and minima of blocks `[n, bytes]`.
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _fields(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Splits blocks into fields of `sizes` bytes and the rest."""
    return np.split(blocks, np.cumsum(sizes), axis=1)


def _half(field: np.ndarray) -> np.ndarray:
    """Numbers of float16 as float32, which is exact."""
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


def _spread(field: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Numbers of `bits` bits: `[n, size · 8 / bits]`.

    In every group of bytes, the lowest bits of all bytes come first.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    bytes_ = field.reshape(len(field), -1, 1, group)
    return (bytes_ >> shifts & np.uint8(2**bits - 1)).reshape(len(field), -1)


def _q8_0(blocks: np.ndarray) -> _Parts:
    scale, integers = _fields(blocks, 2)
    return integers.view(np.int8), _half(scale), None


def _q4_0(blocks: np.ndarray) -> _Parts:
    scale, integers = _fields(blocks, 2)
    return integers, _half(scale), -8 * _half(scale)


def _q4_1(blocks: np.ndarray) -> _Parts:
    scale, minimum, integers = _fields(blocks, 2, 2)
    return integers, _half(scale), _half(minimum)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    fifth = np.unpackbits(high, axis=1, bitorder="little")
    return (_spread(low, 4, 16) | fifth << 4).astype(np.int8)


def _q5_0(blocks: np.ndarray) -> _Parts:
    scale, high, low = _fields(blocks, 2, 4)
    return _five_bits(high, low) - np.int8(16), _half(scale), None


def _q5_1(blocks: np.ndarray) -> _Parts:
    scale, minimum, high, low = _fields(blocks, 2, 2, 4)
    return _five_bits(high, low), _half(scale), _half(minimum)


def _k_scales(
    scale: np.ndarray, minimum: np.ndarray, packed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    scales, minima = gguf.quants.Q4_K.get_scale_min(packed)
    return _half(scale) * scales, -(_half(minimum) * minima)


def _q4_k(blocks: np.ndarray) -> _Parts:
    *scales, low = _fields(blocks, 2, 2, 12)
    return pack(_spread(low, 4, 32)), *_k_scales(*scales)


def _q5_k(blocks: np.ndarray) -> _Parts:
    *scales, high, low = _fields(blocks, 2, 2, 12, 32)
    integers = _spread(low, 4, 32) | _spread(high, 1, 32) << 4
    return integers.astype(np.int8), *_k_scales(*scales)


def _q6_k(blocks: np.ndarray) -> _Parts:
    low, high, scales, scale = _fields(blocks, 128, 64, 16)
    integers = _spread(low, 4, 64) | _spread(high, 2, 32) << 4
    scales = scales.view(np.int8).astype(np.float32)
    return integers.astype(np.int8) - np.int8(32), _half(scale) * scales, None


_KIND = gguf.GGMLQuantizationType
_READERS: dict[gguf.GGMLQuantizationType, Callable[[np.ndarray], _Parts]] = {
    _KIND.Q8_0: _q8_0,
    _KIND.Q4_0: _q4_0,
    _KIND.Q4_1: _q4_1,
    _KIND.Q5_0: _q5_0,
    _KIND.Q5_1: _q5_1,
    _KIND.Q4_K: _q4_k,
    _KIND.Q5_K: _q5_k,
    _KIND.Q6_K: _q6_k,
}


def quantized_matrix(
    raw: np.ndarray, kind: gguf.GGMLQuantizationType
) -> QuantizedMatrix | None:
    """The matrix of a tensor's rows; None if blocks of this type do not fit.

    Args:
      raw: uint8 `[O, bytes]`, which may be mapped from the file; it is copied.
      kind: type of its blocks.
    """
    if kind not in _READERS:
        return None
    blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    integers, scales, minima = _READERS[kind](blocks)

    def rows(part: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(part.reshape(len(raw), -1))

    return QuantizedMatrix(
        rows(integers), rows(scales), None if minima is None else rows(minima)
    )
