"""The implementation of `DeviceOps` for a CPU."""

from bpd_jax.base.errors import UserError
from bpd_jax.cpu.attention_kernel import cache_dtype
from bpd_jax.cpu.device import kernels_of, load_kernels
from bpd_jax.cpu.integer_kernel import lanes
from bpd_jax.cpu.largest import index_of_largest, largest
from bpd_jax.cpu.layer_loop import for_one_loop
from bpd_jax.cpu.layout import decoding_layout, integer_layout
from bpd_jax.cpu.ordered_functions import operations
from bpd_jax.cpu.tile import tile_of_processor
from bpd_jax.cpu.tiled_matrix import BLOCKS
from bpd_jax.models.device_ops import DeviceOps
from bpd_jax.models.transformer_config import INT8, TransformerConfig


class CpuOps(DeviceOps):
    """Kernels where this processor has the instructions, XLA elsewhere."""

    index_of_largest = staticmethod(index_of_largest)
    largest = staticmethod(largest)
    operations = staticmethod(operations)
    for_one_loop = staticmethod(for_one_loop)
    layout = staticmethod(decoding_layout)
    integer_layout = staticmethod(integer_layout)
    cache_dtype = staticmethod(cache_dtype)
    kernels_of = staticmethod(kernels_of)
    load_kernels = staticmethod(load_kernels)

    def check_integers(self, trunk: TransformerConfig) -> None:
        tile = tile_of_processor()
        if lanes() is None or tile is None:
            super().check_integers(trunk)
        elif trunk.head_width % tile.width:
            raise UserError(
                "precision=int8 is for models whose heads have a multiple of "
                f"{tile.width} features, not {trunk.head_width}."
            )
        for name, length in (
            ("d_model", trunk.d_model),
            ("d_ff", trunk.d_ff),
            ("attention", trunk.num_heads * trunk.head_width),
        ):
            if length % BLOCKS[-1]:
                raise UserError(
                    f"precision=int8 is for matrices in blocks of {BLOCKS[-1]} numbers,"
                    f" but {name} of this model has {length} features."
                )

    def multiplies_quantized(self, precision: str | None) -> bool:
        # The kernels expand a matrix in registers, in float32 and with integers.
        known = precision in (None, "float32", INT8)
        return known and tile_of_processor() is not None
