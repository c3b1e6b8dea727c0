import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bpd_jax.models import prefix_attention as module
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.prefix_attention import in_blocks, in_parts, of_mask

SLOTS, TOKENS, GROUP = 75, 5, 2
# A row without a text, one of few tokens, one that ends with a block, and a full one.
LENGTHS = np.array([0, 3, 32, 70], np.int32)


def inputs(width=8, dtype=np.float32, tokens=TOKENS):
    rng = np.random.default_rng(0)
    shapes = (4, 2, tokens * GROUP, width), (4, 2, width, SLOTS), (4, 2, SLOTS, width)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    # Slots after the text may have any values.
    for row, length in enumerate(LENGTHS):
        arrays[1][row, :, :, length:] = arrays[2][row, :, length:] = 1e4
    # The nodes of a tree, at depths that are not sorted.
    depths = rng.integers(0, 5, (4, tokens)).astype(np.int32)
    return *(jnp.asarray(x, dtype) for x in arrays), LENGTHS, LENGTHS[:, None] + depths


def reference(queries, keys, values, lengths, positions, window=None, softcap=None):
    """Attention to all slots, with a mask."""
    slot = np.arange(SLOTS)
    seen = (slot < lengths[:, None])[:, None] & np.ones(
        (1, positions.shape[1], 1), bool
    )
    if window is not None:
        seen &= positions[:, :, None] - slot < window
    return of_mask(queries, keys, values, np.repeat(seen, GROUP, axis=1), softcap)


def by_query(function):
    """`function`, with the positions of the queries in place of the tokens."""
    return jax.jit(lambda *a: function(*a[:4], jnp.repeat(a[4], GROUP, axis=1)))


def interpreted(window=None, softcap=None):
    return functools.partial(in_parts, window=window, softcap=softcap, interpret=True)


def assert_equal(got, want, tolerance=1e-5):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 16)


@pytest.mark.parametrize(
    "window, softcap", [(None, None), (4, None), (20, None), (None, 2.0)]
)
def test_blocks_equal_a_mask(window, softcap):
    arrays = inputs()
    attend = functools.partial(in_blocks, window=window, softcap=softcap)
    assert_equal(by_query(attend)(*arrays), reference(*arrays, window, softcap))


@pytest.mark.parametrize("window, softcap", [(None, 2.0), (20, None)])
@pytest.mark.parametrize("tokens, width", [(TOKENS, 24), (40, 16)])
def test_the_kernel_of_gpus_equals_a_mask(tokens, width, window, softcap):
    """Interpreted: sizes that are no powers of 2, and two tiles of queries."""
    arrays = inputs(width, tokens=tokens)
    got = by_query(interpreted(window, softcap))(*arrays)
    assert_equal(got, reference(*arrays, window, softcap))


@pytest.mark.gpu
@pytest.mark.skipif(
    "all(device.platform != 'gpu' for device in jax.devices())", reason="needs a GPU"
)
@pytest.mark.parametrize("window", [None, 20])
def test_the_kernel_on_a_gpu_equals_a_mask(window):
    arrays = inputs(64, tokens=40)
    got = by_query(functools.partial(in_parts, window=window))(*arrays)
    assert_equal(got, reference(*arrays, window), 1e-4)


@pytest.mark.parametrize("attend", [in_blocks, interpreted()])
def test_bfloat16_is_summed_in_float32(attend):
    arrays = inputs(16, jnp.bfloat16)
    exact = reference(*(x.astype(jnp.float32) for x in arrays[:3]), *arrays[3:])
    for got, want in zip(by_query(attend)(*arrays), exact, strict=True):
        error = np.abs(got - want)[np.isfinite(want)].max()
        assert error < 0.02 * np.abs(want[np.isfinite(want)]).max()


def test_sums_of_the_kernel_do_not_depend_on_the_number_of_queries():
    queries, *rest, positions = inputs(16, tokens=40)
    whole = by_query(interpreted())(queries, *rest, positions)
    first = by_query(interpreted())(queries[:, :, :GROUP], *rest, positions[:, :1])
    for one, every in zip(first, whole, strict=True):
        np.testing.assert_array_equal(one, every[:, :, :GROUP])


def test_no_block_after_the_longest_text_is_read():
    queries, keys, values, _, positions = inputs()
    lengths = np.array([3, 0, 20, 31], np.int32)
    values = values.at[:, :, 32:].set(np.nan)
    mixed, *_ = by_query(in_blocks)(queries, keys, values, lengths, positions)
    assert np.isfinite(mixed[3]).all()
    lengths = np.array([3, 0, 20, 33], np.int32)
    mixed, *_ = by_query(in_blocks)(queries, keys, values, lengths, positions)
    assert np.isnan(mixed).any()


@pytest.mark.parametrize("shape", [(4, 1, 2), (1, 2, 4)])
def test_devices_read_their_own_rows_and_heads(shape):
    """Two heads are split over two devices, and computed by all of four."""
    arrays, mesh = inputs(), make_mesh(MeshConfig(*shape))
    heads = "model" if shape[2] == 2 else None
    cached = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), heads))
    arrays = *(jax.device_put(x, cached) for x in arrays[:3]), *arrays[3:]
    function = jax.jit(functools.partial(module.prefix_attention, mesh=mesh))
    assert_equal(function(*arrays), reference(*arrays))
    text = function.lower(*arrays).compile().as_text()
    assert not re.search("all-(reduce|gather)|permute|all-to-all", text)
