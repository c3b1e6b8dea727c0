import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models import segment_attention as module
from bpd_jax.models.attention import attention, causal_mask
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.segment_attention import Segments, chosen, fused

# Two documents and padding; a row of one document; a row of padding alone.
IDS = np.array([[1] * 90 + [2] * 60 + [0] * 10, [1] * 160, [0] * 160], np.int32)


def inputs(num_heads=4, kv_heads=2, width=128, ids=IDS):
    rng = np.random.default_rng(0)
    rows, length = ids.shape
    queries = rng.normal(size=(rows, length, num_heads, width))
    keys, values = rng.normal(size=(2, rows, length, kv_heads, width))
    return tuple(x.astype(np.float32) for x in (queries, keys, values))


def gradients(function, arrays, ids=IDS):
    """The output, and the gradients of a weighted sum of it."""
    weights = np.random.default_rng(1).normal(size=arrays[0].shape)
    segments = Segments(None if ids is None else jnp.asarray(ids))

    def loss(arrays):
        mixed = function(*arrays, segments)
        return (mixed * weights).sum(), mixed

    (_, mixed), array_gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        arrays
    )
    return mixed, *array_gradients


def attend(queries, keys, values, segments, *options, **named):
    return segments.attend(queries, keys, values, *options, **named)


def plain(queries, keys, values, segments, window=None, softcap=None):
    rows = jnp.ones(queries.shape[:2], int) if segments.ids is None else segments.ids
    mask = causal_mask(rows, window)
    return attention(queries, keys, values, mask, softcap=softcap)


def assert_equal(got, want, tolerance=1e-5):
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def check(function, arrays, ids=IDS, tolerance=1e-5, **options):
    """Compares outputs and gradients with those of plain attention."""
    got = gradients(functools.partial(function, **options), arrays, ids)
    want = gradients(functools.partial(plain, **options), arrays, ids)
    assert_equal(got, want, tolerance)


@pytest.mark.parametrize(
    "length, packed, options",
    [
        (256, True, {}),
        # Padded to the kernel's 256 tokens.
        (160, True, {"window": 70, "softcap": 2.0}),
        (160, False, {}),
        (160, False, {"window": 70}),
    ],
)
def test_the_pallas_kernel_equals_plain_attention(length, packed, options):
    ids = np.pad(IDS, ((0, 0), (0, length - 160)))
    arrays, ids = inputs(2, 1, ids=ids), ids if packed else None
    pallas = functools.partial(attend, implementation="pallas")
    check(pallas, arrays, ids, 2e-4, **options)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_the_pallas_kernel_runs_on_every_devices_own_rows_and_heads(kv_heads):
    ids = IDS[[0, 1, 2, 0], :128]
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, model=4))
    arrays = inputs(4, kv_heads, 32, ids)
    check(lambda *a: attend(*a, "pallas", mesh), arrays, ids, 2e-4)


@pytest.mark.parametrize(
    ("length", "num_heads", "kv_heads"), [(160, 4, 4), (159, 4, 2), (100, 3, 1)]
)
def test_attention_in_chunks_equals_plain_attention(length, num_heads, kv_heads):
    ids = IDS[:, :length]
    arrays = inputs(num_heads, kv_heads, 32, ids)
    check(attend, arrays, ids)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("window", [None, 5, 70])
def test_long_rows_and_windows_in_chunks(monkeypatch, window, packed):
    """Groups of chunks, a last shorter one, and scores that are computed twice."""
    monkeypatch.setattr(module, "_CHUNK", 16)
    monkeypatch.setattr(module, "_GROUPS", 3)
    monkeypatch.setattr(module, "_LONG", 100)
    ids = IDS[:2, :157]
    arrays = inputs(4, 2, 8, ids)
    ids = ids if packed else None
    options = {"window": window, "softcap": 2.0 if window == 70 else None}
    check(attend, arrays, ids, **options)


def test_attention_in_bfloat16_on_a_cpu_has_the_gradients_of_float32():
    arrays = inputs(4, 2, 32)
    rounded = tuple(jnp.asarray(x, jnp.bfloat16) for x in arrays)
    exact = gradients(plain, tuple(x.astype(jnp.float32) for x in rounded))
    got = gradients(attend, rounded)
    for actual, expected in zip(
        jax.tree.leaves(got), jax.tree.leaves(exact), strict=True
    ):
        assert actual.dtype == jnp.bfloat16
        error = (
            np.abs(actual.astype(np.float32) - expected).max() / np.abs(expected).max()
        )
        assert error < 0.01


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("case", ["packed", "in chunks", "whole texts"])
def test_fused_attention_equals_plain_attention(monkeypatch, case, window):
    """The call for cuDNN on a GPU, with JAX's own implementation."""
    if case == "in chunks":
        monkeypatch.setattr(module, "_CUDNN_CHUNK", 64)
    ids = None if case == "whole texts" else IDS
    arrays = inputs(width=16)

    def attend(queries, keys, values, segments, window):
        return fused(queries, keys, values, segments.ids, "xla", window)

    check(attend, arrays, ids, 2e-5, window=window)


def test_chunks_have_even_numbers_of_keys():
    """CuDNN computes no others."""
    sizes, rows = [], jnp.zeros((1, 1024, 1, 8))

    def attend(queries, keys, values, mask):
        sizes.append(keys.shape[1])
        assert mask.shape[1:] == (queries.shape[1], keys.shape[1])
        return queries

    options = {"axis": 1, "size": 256, "recompute": False}
    module.in_chunks(attend, rows, rows, rows, None, 300, **options)
    assert sizes == [256, 512, 640, 640]


def has_gpu():
    return any(device.platform == "gpu" for device in jax.devices())


@pytest.mark.gpu
@pytest.mark.skipif("not has_gpu()", reason="needs a GPU")
def test_cudnn_equals_plain_attention():
    arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs())
    got = gradients(lambda *a: attend(*a, "cudnn"), arrays)
    exact = gradients(plain, tuple(x.astype(jnp.float32) for x in arrays))
    assert_equal([np.asarray(x, np.float32) for x in got], exact, 0.1)
    assert chosen("auto", jnp.bfloat16, arrays[0].shape) == "cudnn"


class Device:
    def __init__(self, platform, capability):
        self.platform = platform
        if capability is not None:
            self.compute_capability = capability


def mesh_of(platform, capability=None):
    device = np.array([Device(platform, capability)], object).reshape(1, 1, 1)
    return jax.sharding.Mesh(device, ("data", "fsdp", "model"))


@pytest.mark.parametrize(
    "platform, capability, dtype, length, width, kernel, obstacle",
    [
        ("cpu", None, "bfloat16", 512, 128, "xla", "8.0 or higher, not cpu: "),
        ("tpu", None, "float32", 512, 128, "pallas", "cannot compute in float32"),
        ("gpu", "9.0", "bfloat16", 512, 128, "cudnn", None),
        ("gpu", "7.5", "bfloat16", 512, 128, "xla", "higher, not gpu of 7.5: "),
        ("gpu", "gfx942", "bfloat16", 512, 128, "xla", "not gpu of gfx942"),
        ("gpu", "9.0", "float32", 512, 128, "xla", "cannot compute in float32"),
        ("gpu", "9.0", "bfloat16", 511, 128, "xla", "rows of 511 tokens"),
        ("gpu", "9.0", "bfloat16", 512, 100, "xla", "with heads of width 100"),
    ],
)
def test_auto_selects_the_kernel_of_the_devices(
    platform, capability, dtype, length, width, kernel, obstacle
):
    """Where cuDNN cannot compute, asking for it is refused with the obstacle."""
    arguments = jnp.dtype(dtype), (2, length, 4, width), mesh_of(platform, capability)
    assert chosen("auto", *arguments) == kernel
    assert chosen("xla", *arguments) == "xla"
    if obstacle is None:
        assert chosen("cudnn", *arguments) == "cudnn"
    else:
        with pytest.raises(UserError, match=obstacle):
            chosen("cudnn", *arguments)
