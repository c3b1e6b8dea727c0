"""What is done differently on a CPU. The rest of bpd_jax calls only what is here.

Everything may be called on any device: elsewhere than on a CPU the functions compute
the same in the plain way, or return what they were given.

Decoding: `decoding_layout` stores matrices as a CPU reads them fastest; `product` and
`logits` multiply with them, `prefix_attention` reads the cache, and `index_of_largest`
and `largest` choose tokens; `multiplies_quantized` says whether that is fast without
expanding matrices. `loop_over_layers` runs all layers of a pass with one body, where
`loops_over_layers` says so. `integer_layout` is that of `--precision=int8`, where
`check_integers` allows it; `ordered_attention`, `row_norm` and `row_activation` then do
not depend on the number of tokens. `microseconds` reads a clock in a program.
`kernels_of` and `load_kernels` are for programs that are kept on disk,
`return_freed_memory` for what reading or compiling them took, and `compiler_options`
for compiling them sooner.
Training: `float32_sums`, `summed_rows` and `keep_freed_memory`. What is left, such as a
size that depends on the device, asks `on_cpu`, whose answer `compile_for` sets where
programs are compiled for other devices.
"""

from bpd_jax.models.cpu.attention_kernel import cache_dtype, prefix_attention
from bpd_jax.models.cpu.device import (
    COMPILER_OPTIONS,
    compile_for,
    compiler_options,
    on_cpu,
)
from bpd_jax.models.cpu.host import (
    keep_freed_memory,
    microseconds,
    return_freed_memory,
)
from bpd_jax.models.cpu.largest import index_of_largest, largest
from bpd_jax.models.cpu.layer_loop import loop_over_layers, loops_over_layers
from bpd_jax.models.cpu.layout import (
    SOFTMAX,
    check_integers,
    decoding_layout,
    integer_layout,
    is_packed,
    rounds_activations,
)
from bpd_jax.models.cpu.ordered_functions import (
    ordered_attention,
    row_activation,
    row_norm,
)
from bpd_jax.models.cpu.products import (
    float32_sums,
    in_order,
    logits,
    product,
    summed_rows,
)
from bpd_jax.models.cpu.tile import kernels_of, load_kernels, multiplies_quantized

__all__ = [
    "COMPILER_OPTIONS",
    "SOFTMAX",
    "cache_dtype",
    "check_integers",
    "compile_for",
    "compiler_options",
    "decoding_layout",
    "float32_sums",
    "in_order",
    "index_of_largest",
    "integer_layout",
    "is_packed",
    "keep_freed_memory",
    "kernels_of",
    "largest",
    "load_kernels",
    "logits",
    "loop_over_layers",
    "loops_over_layers",
    "microseconds",
    "multiplies_quantized",
    "on_cpu",
    "ordered_attention",
    "prefix_attention",
    "product",
    "return_freed_memory",
    "rounds_activations",
    "row_activation",
    "row_norm",
    "summed_rows",
]
