"""Products with weights of 8 bits through the compilers of accelerators.

`make tpu-test` and `make gpu-test` run this test.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from bpd_jax.compilation.compiler import COMPILER_OPTIONS, find_slice
from bpd_jax.models.cpu.products import times_rows
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.models.quantized import QuantizedMatrix
from bpd_jax.models.quantized_kernel import MOST_ROWS
from tests.compilation.compilers import NEEDS_CUDA, NEEDS_LIBTPU


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v5e:2x2", marks=NEEDS_LIBTPU),
        pytest.param("h100:4", marks=NEEDS_CUDA),
    ],
)
def test_one_scale_for_an_output_lets_products_read_integers(topology, rows):
    outputs, inputs = 11008, 4096
    mesh = make_mesh(MeshConfig(data=4), find_slice(topology).devices[:4])
    place = NamedSharding(mesh, PartitionSpec())

    def shape(*sizes, dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    matrix = QuantizedMatrix(
        shape(outputs, inputs, dtype=jnp.int8), shape(outputs, 1, dtype=jnp.float32)
    )
    x = shape(rows, inputs, dtype=jnp.bfloat16)
    lowered = jax.jit(times_rows, static_argnums=2).lower(x, matrix, "bfloat16")
    options = COMPILER_OPTIONS if topology.startswith("h100") else None
    memory = lowered.compile(options).memory_analysis()
    # The matrix in bfloat16 would take twice as much.
    assert memory.temp_size_in_bytes < outputs * inputs / 3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 8, MOST_ROWS])
@NEEDS_CUDA
def test_a_gpu_does_not_expand_blocks_in_memory(rows, bits):
    outputs, inputs = 11008, 4096
    place = SingleDeviceSharding(find_slice("h100:1").devices[0])

    def shape(*sizes, dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    packed = jnp.uint8 if bits == 4 else jnp.int8
    scales = shape(outputs, inputs // 32, dtype=jnp.float32)
    matrix = QuantizedMatrix(
        shape(outputs, inputs * bits // 8, dtype=packed), scales, scales, in_kernel=True
    )
    x = shape(rows, inputs, dtype=jnp.bfloat16)
    lowered = jax.jit(times_rows, static_argnums=2).lower(x, matrix, "bfloat16")
    memory = lowered.compile(COMPILER_OPTIONS).memory_analysis()
    assert memory.temp_size_in_bytes < outputs * inputs / 7
