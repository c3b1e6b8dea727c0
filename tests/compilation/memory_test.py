"""Attention and products of 8 bits through the compilers of accelerators.

What stays in fast memory. `make tpu-test` and `make gpu-test` run these tests.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from bpd_jax.compilation.compiler import COMPILER_OPTIONS, find_slice
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.partitioning import BATCH_SPEC
from bpd_jax.models.prefix_attention import prefix_attention
from bpd_jax.models.products import times_rows
from bpd_jax.models.quantized import QuantizedMatrix
from bpd_jax.models.quantized_kernel import MOST_ROWS
from bpd_jax.models.segment_attention import Segments
from tests.compilation.compilers import NEEDS_CUDA, NEEDS_LIBTPU

CHIPS = [
    pytest.param("v5e:2x2", marks=NEEDS_LIBTPU),
    pytest.param("h100:4", marks=NEEDS_CUDA),
]


def temporary_bytes(topology, mesh_shape, function, *shapes):
    """Temporary memory of a device; rows and heads (the second axis) are divided."""
    mesh = make_mesh(MeshConfig(*mesh_shape), find_slice(topology).devices[:4])
    arguments = []
    for shape, dtype in shapes:
        axes = ["model"] if len(shape) == 4 else []
        spec = NamedSharding(mesh, PartitionSpec(*BATCH_SPEC, *axes))
        arguments.append(jax.ShapeDtypeStruct(shape, dtype, sharding=spec))
    options = COMPILER_OPTIONS if topology.startswith("h100") else None
    lowered = jax.jit(lambda *a: function(mesh, *a)).lower(*arguments)
    return lowered.compile(options).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dtype, nodes", [("bfloat16", 1), ("float32", 32)])
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("topology", CHIPS)
def test_the_cache_is_not_copied(topology, window, dtype, nodes):
    """Each of four devices has two of four rows, and four of eight heads."""
    rows, heads, slots, width = 4, 8, 8192, 128

    def run(mesh, *arrays):
        return prefix_attention(*arrays, window, mesh=mesh)

    size = temporary_bytes(
        topology,
        (2, 1, 2),
        run,
        ((rows, heads, nodes, width), dtype),
        ((rows, heads, width, slots), dtype),
        ((rows, heads, slots, width), dtype),
        ((rows,), jnp.int32),
        ((rows, nodes), jnp.int32),
    )
    layer = rows * heads * width * slots * jnp.dtype(dtype).itemsize
    assert size < layer / 4 / 4


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("topology", CHIPS)
def test_whole_texts_need_no_scores(topology, window):
    """Flash attention in bfloat16, on rows and heads of a device."""
    length, heads = 4096, 8

    def run(mesh, *arrays):
        arrays = (x.swapaxes(1, 2) for x in arrays)
        return Segments().attend(*arrays, "auto", mesh, window)

    shapes = [((2, n, length, 128), "bfloat16") for n in (heads, 2, 2)]
    assert temporary_bytes(topology, (2, 1, 2), run, *shapes) < length * length


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("topology", CHIPS)
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
