"""Causal attention of whole texts or packed rows, with memory linear in their length.

Flash attention on GPUs (cuDNN) and TPUs (jax's Pallas kernel `splash_attention`), and
`chunked_attention` elsewhere. Padding is a segment like any other, so that no row of
scores is empty.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.models.attention import Segments, causal_mask
from bpd_jax.models.chunked_attention import chunked_attention, in_chunks
from bpd_jax.models.partitioning import (
    attention_spec,
    constrain,
    first_device,
    has_tensor_cores,
)

# Block sizes of the Pallas kernel, in tokens; rows are padded to a multiple of the
# last one.
_BLOCKS = (512, 256, 128)

# cuDNN reads segments as a mask of queries × keys, for so many queries at a time.
_CUDNN_CHUNK = 2048


def segment_attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    segments: Segments,
    implementation: str = "auto",
    mesh: Mesh | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Each token attends to itself and the earlier tokens of its segment.

    Queries are unscaled; N is a multiple of K. A token sees the last `window` tokens,
    itself included. For `implementation` see `ComputeConfig.attention`, for `softcap`
    `attention.capped`.
    """
    kernel = chosen(implementation, queries.dtype, queries.shape, mesh, softcap)
    if kernel == "pallas":
        return _pallas(queries, keys, values, segments.ids, mesh, window, softcap)
    if kernel == "cudnn":
        if mesh is not None:
            heads = math.gcd(queries.shape[2], keys.shape[2])
            spec = attention_spec(len(queries), heads, mesh, heads_axis=2)
            queries, keys, values = (
                constrain(x, mesh, spec) for x in (queries, keys, values)
            )
        return fused(queries, keys, values, segments, "cudnn", window)
    return chunked_attention(queries, keys, values, segments.ids, window, softcap)


def chosen(
    implementation: str,
    dtype: jnp.dtype,
    shape: tuple[int, ...],
    mesh: Mesh | None = None,
    softcap: float | None = None,
) -> str:
    """`xla`, `cudnn` or `pallas`, for queries of a shape [B, T, N, H]."""
    if implementation == "cudnn":
        obstacle = _cudnn_obstacle(dtype, shape, mesh, softcap)
        if obstacle is not None:
            raise UserError(
                f"ComputeConfig.attention = 'cudnn' {obstacle}, or set attention = "
                "'auto' or 'xla'."
            )
    if implementation != "auto":
        return implementation
    if first_device(mesh).platform == "tpu":
        return "pallas"
    # Also on a GPU without cuDNN's flash attention, `auto` is plain XLA.
    return "xla" if _cudnn_obstacle(dtype, shape, mesh, softcap) else "cudnn"


def _cudnn_obstacle(
    dtype: jnp.dtype,
    shape: tuple[int, ...],
    mesh: Mesh | None,
    softcap: float | None,
) -> str | None:
    """Why cuDNN's flash attention does not support this, and the remedy; or None.

    The sizes are those that `jax.nn.dot_product_attention` takes with a gradient and a
    mask, on the oldest GPUs that it runs on.
    """
    _, length, _, width = shape
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cannot compute in {dtype}: set TransformerConfig.dtype = 'bfloat16'"
    device = first_device(mesh)
    if not has_tensor_cores(device):
        capability = str(getattr(device, "compute_capability", ""))
        kind = f" of {capability}" if capability else ""
        return (
            "needs NVIDIA GPUs of compute capability 8.0 or higher, not "
            f"{device.platform}{kind}: use other devices"
        )
    if width % 8 or width > 128:
        return (
            f"cannot compute with heads of width {width}: set "
            "TransformerConfig.head_dim to a multiple of 8 up to 128"
        )
    if softcap is not None:
        return "cannot cap scores (TransformerConfig.attention_softcap): use pallas"
    if length % 2:
        return f"cannot compute rows of {length} tokens: make TrainConfig.length even"
    return None


def fused(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    segments: Segments,
    implementation: Literal["xla", "cudnn"],
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """`jax.nn.dot_product_attention` within segments.

    Scores stay in cuDNN's kernel, and those of later tokens are not computed. It reads
    the segments as one bias for all heads of a row, `[B, 1, T, T]` of short rows, in
    chunks of long ones; a row that is one segment needs none.
    """
    attend = functools.partial(
        jax.nn.dot_product_attention, implementation=implementation
    )
    arrays, length = (queries, keys, values), queries.shape[1]
    if segments.ids is None:
        near = None if window is None else (window - 1, 0)
        return attend(*arrays, is_causal=True, local_window_size=near)
    if length <= _CUDNN_CHUNK:
        mask = causal_mask(segments.ids, window)[:, None]
        return attend(*arrays, mask=mask, is_causal=True)
    return in_chunks(
        lambda *chunk: attend(*chunk[:3], mask=chunk[3][:, None]),
        *arrays,
        segments.ids,
        window,
        axis=1,
        size=_CUDNN_CHUNK,
        recompute=True,
    )


def _pallas(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    ids: Int[Array, "B T"] | None,
    mesh: Mesh | None,
    window: int | None,
    softcap: float | None,
) -> Float[Array, "B T N H"]:
    """Splash attention on every device's own rows and heads."""
    interpret = first_device(mesh).platform != "tpu"
    run = functools.partial(
        _splash, window=window, softcap=softcap, interpret=interpret
    )
    if mesh is None or mesh.size == 1:
        return run(queries, keys, values, ids)
    rows, _, num_heads, _ = queries.shape
    kv_heads = keys.shape[2]
    spec = attention_spec(rows, num_heads, mesh, heads_axis=2)
    if spec != attention_spec(rows, kv_heads, mesh, heads_axis=2):
        # Fewer key-value heads than shards: every query head gets its own copy.
        keys, values = (
            jnp.repeat(x, num_heads // kv_heads, axis=2) for x in (keys, values)
        )
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(spec, spec, spec, PartitionSpec(spec[0])),
        out_specs=spec,
        check_vma=False,
    )(queries, keys, values, ids)


def _splash(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    ids: Int[Array, "B T"] | None,
    *,
    window: int | None,
    softcap: float | None,
    interpret: bool,
) -> Float[Array, "B T N H"]:
    # Imported late: the import takes a second, and decoding does not need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length, num_heads, width = queries.shape[1:]
    # Attention is causal, so padding at the end of a row does not affect its tokens.
    missing = -length % _BLOCKS[-1]
    total = length + missing
    block = next(size for size in _BLOCKS if total % size == 0)
    square = (total, total)
    mask = (
        splash.CausalMask(square)
        if window is None
        else splash.LocalMask(square, (window - 1, 0), offset=0)
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * num_heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        attn_logits_soft_cap=softcap,
        q_seq_shards=1,
        interpret=interpret,
    )

    def heads_first(x: Array) -> Float[Array, "B n T H"]:
        return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))).swapaxes(1, 2)

    segments: tuple[Any, ...] = ()
    if ids is not None:
        ids = jnp.pad(ids, ((0, 0), (0, missing)))
        segments = (splash.SegmentIds(ids, ids),)
    mixed = jax.vmap(kernel)(
        heads_first(queries * width**-0.5),
        heads_first(keys),
        heads_first(values),
        *segments,
    )
    return mixed.swapaxes(1, 2)[:, :length].astype(queries.dtype)
