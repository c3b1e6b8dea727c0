"""FLOPs of single instructions, two per multiplication with addition."""

import math
import re

from bpd_jax.compilation.hlo import ArrayShape, Computation, Instruction

CUDNN_ATTENTION = "__cudnn$fmha"
CUBLAS = "__cublas$"

# Matrix products per pair of query and key in jax's splash attention: scores and
# values forward; backward scores, weights and queries, or also keys and values.
_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}


def dot_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of a dot product: 2 · elements of the result · length of the sums."""
    left = computation.operands(instruction)[0].shapes[0].dims
    summed = math.prod(left[i] for i in instruction.numbers("lhs_contracting_dims"))
    return 2.0 * instruction.shapes[0].elements * summed


def convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of a convolution, without products with padding.

    The TPU compiler expresses matrix products as convolutions, and batched ones with
    windows over the batch that cover mostly padding.
    """
    left, right = (x.shapes[0].dims for x in computation.operands(instruction)[:2])
    out = instruction.shapes[0].dims
    labels = instruction.attributes.partition("dim_labels=")[2].partition(",")[0]
    lhs, rest = labels.split("_")
    rhs, result = rest.split("->")
    window = instruction.attributes.partition("window={")[2].partition("}")[0]
    spatial = sorted(label for label in result if label.isdigit())
    count = len(spatial)

    def each(name: str, default: str) -> list[str]:
        fields = dict(part.split("=") for part in window.split() if "=" in part)
        return fields[name].split("x") if name in fields else [default] * count

    pads, strides = each("pad", "0_0"), each("stride", "1")
    dilations, bases = each("rhs_dilate", "1"), each("lhs_dilate", "1")
    pairs = 1
    for i, label in enumerate(spatial):
        pairs *= _meetings(
            left[lhs.index(label)],
            right[rhs.index(label)],
            out[result.index(label)],
            int(pads[i].split("_")[0]),
            int(strides[i]),
            int(dilations[i]),
            int(bases[i]),
        )
    features = right[rhs.index("i")] * out[result.index("f")] * out[result.index("b")]
    return 2.0 * features * pairs


def _meetings(
    size: int, kernel: int, out: int, pad: int, stride: int, dilation: int, base: int
) -> int:
    """Number of pairs of output and kernel positions that use an input, on one axis."""
    if kernel == 1 and pad == 0 and base == 1:
        return out
    last = (size - 1) * base
    total = 0
    for k in range(kernel):
        positions = range(k * dilation - pad, k * dilation - pad + out * stride, stride)
        total += sum(
            0 <= position <= last and position % base == 0 for position in positions
        )
    return total


def _numbers(name: str, attributes: str) -> list[int]:
    """The numbers of the first list `"NAME": ["1", …]` of a backend's configuration."""
    match = re.search(rf'"{name}":\s*\[(.*?)\]', attributes)
    return [int(x) for x in re.findall(r"\d+", match[1])] if match else []


def matmul_flops(
    operands: list[ArrayShape], result: ArrayShape, attributes: str
) -> float:
    """FLOPs of a matrix product by cuBLAS: 2 · elements of the result · length.

    Args:
      operands: shapes of the factors, and of what is added to their product.
      result: shape of the product.
      attributes: attributes of the call, with the axes that are summed.
    """
    axes = _numbers("lhs_contracting_dimensions", attributes)
    return 2.0 * result.elements * math.prod(operands[0].dims[i] for i in axes)


def kernel_flops(name: str, operands: list[ArrayShape], attributes: str) -> float:
    """FLOPs of one call of an attention kernel; 0 for an unknown kernel.

    Causal attention skips the blocks above the diagonal: n (n+1) / 2 of n × n blocks
    are computed, including those on the diagonal completely.

    Args:
      name: name of the kernel in the program.
      operands: shapes of its operands; in Pallas the first float array of at least
        three axes is the queries `[…, N, T, H]`, in cuDNN the first, `[B, T, N, H]`.
      attributes: attributes of the kernel, which contain its block sizes, or the shape
        of cuDNN's scores, `[B, N, T, S]`.
    """
    if name.startswith(CUDNN_ATTENTION):
        scores = attributes.partition("intermediate_tensor_shape")[2]
        keys = _numbers("dimensions", scores)[-1]
        products = 5 if "Backward" in name else 2
        share = 0.5 if re.search(r'"mask_type":\s*"CAUSAL"', attributes) else 1.0
        return 2.0 * products * operands[0].elements * keys * share
    products = next((n for key, n in _PRODUCTS.items() if name.startswith(key)), 0)
    queries = next((x for x in operands if len(x.dims) > 2 and "f" in x.dtype), None)
    if not products or queries is None:
        return 0.0
    *batch, length, width = queries.dims
    size = re.search(r"block_q\W+(\d+)", attributes)
    blocks = length // int(size[1]) if size else 1
    share = (blocks + 1) / (2 * blocks)
    return 2.0 * products * math.prod(batch) * length**2 * width * share
