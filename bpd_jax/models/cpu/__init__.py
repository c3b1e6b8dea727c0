"""What is done differently on a CPU. The rest of bpd_jax calls only what is here.

Everything may be called on any device: elsewhere than on a CPU the functions compute
the same in the plain way, or return what they were given.

Decoding: `decoding_layout` stores matrices as a CPU reads them fastest; `product` and
`logits` multiply with them, `prefix_attention` reads the cache, and `index_of_largest`
chooses tokens; `multiplies_quantized` says whether that is fast without expanding
matrices. Training: `float32_sums`, `summed_rows` and `keep_freed_memory`. What is left,
such as a size that depends on the device, asks `on_cpu`, whose answer `compile_for`
sets where programs are compiled for other devices.
"""

from bpd_jax.models.cpu.attention_kernel import cache_dtype, prefix_attention
from bpd_jax.models.cpu.device import compile_for, on_cpu
from bpd_jax.models.cpu.host_memory import keep_freed_memory
from bpd_jax.models.cpu.largest import index_of_largest
from bpd_jax.models.cpu.layout import decoding_layout, is_packed
from bpd_jax.models.cpu.products import float32_sums, logits, product, summed_rows
from bpd_jax.models.cpu.tile import multiplies_quantized

__all__ = [
    "cache_dtype",
    "compile_for",
    "decoding_layout",
    "float32_sums",
    "index_of_largest",
    "is_packed",
    "keep_freed_memory",
    "logits",
    "multiplies_quantized",
    "on_cpu",
    "prefix_attention",
    "product",
    "summed_rows",
]
