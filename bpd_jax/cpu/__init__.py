"""What a model computes in another way on a CPU. Other packages call what is here.

Everything may be called on any device: elsewhere than on a CPU the functions compute
the same in the plain way, or return what they were given.

- Decoding begins with `prepared`: a model in a precision, its parameters stored as its
  devices read them fastest. `decoding_layout` does so for the parts of drafters, and
  `multiplies_quantized` says whether quantized matrices may stay so.
- The kind of the stored matrices then decides what happens, so that modules do not ask:
  `product` and `logits` multiply with them, `operations` are the norms, activations and
  attention that go with them, in the same order for any number of tokens, and
  `loop_over_layers` runs all layers with one body.
- `index_of_largest` and `largest` choose tokens, and `in_order` saves a copy.
- Training: `float32_sums` and `summed_rows`, for products in bfloat16.

Two modules beside it are called too: `device`, whether the devices are CPUs and how
their programs are compiled and kept, and `host`, the memory and clock of the process.
"""

from bpd_jax.cpu.largest import index_of_largest, largest
from bpd_jax.cpu.layer_loop import loop_over_layers
from bpd_jax.cpu.layout import (
    SOFTMAX,
    decoding_layout,
    multiplies_quantized,
    prepared,
)
from bpd_jax.cpu.ordered_functions import operations
from bpd_jax.cpu.products import (
    float32_sums,
    in_order,
    logits,
    product,
    summed_rows,
)

__all__ = [
    "SOFTMAX",
    "decoding_layout",
    "float32_sums",
    "in_order",
    "index_of_largest",
    "largest",
    "logits",
    "loop_over_layers",
    "multiplies_quantized",
    "operations",
    "prepared",
    "product",
    "summed_rows",
]
