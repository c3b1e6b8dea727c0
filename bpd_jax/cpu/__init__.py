"""What a model computes in another way on a CPU, as `device_ops` registers it.

- A model made ready for decoding is stored as the kernels read it (`layout`).
- The kind of the stored matrices then decides what happens, so that modules do not ask:
  a `KernelPacked` multiplies by kernels (`products`), `operations` are the norms,
  activations and attention that go with it, in the same order for any number of tokens
  (`ordered_functions`), and `loop_over_layers` runs all layers with one body
  (`layer_loop`).
- `index_of_largest` and `largest` choose tokens (`largest`).
"""

from bpd_jax.cpu.cpu_ops import CpuOps
from bpd_jax.models import device_ops

device_ops.register("cpu", CpuOps())
