"""Causal attention of whole texts or packed rows, with memory linear in their length.

Flash attention on GPUs (cuDNN) and TPUs (jax's Pallas kernel `splash_attention`), and
`chunked_attention` elsewhere, which XLA computes for one chunk of the queries at a
time: the memory of a row grows linearly with its length, and tokens after a chunk are
left out of its scores, which are half of all. Padding is a segment like any other, so
that no row of scores is empty.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.models.attention import WholeTexts, capped, causal_mask
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


# ---- Those of `chunked_attention` ----
# Queries of a chunk, at most.
_CHUNK = 256
# Shorter rows are one chunk.
_SHORTEST = 128
# The scores of longer rows are computed once more for their gradients.
_LONG = 1024
# The first key of a chunk is a multiple of it.
_EVEN = 128
# Chunks are compiled in at most so many groups, of which each has the same keys.
_GROUPS = 8


@flax.struct.dataclass
class Segments(WholeTexts):
    """Each token attends to itself and the earlier tokens of its segment.

    A compact representation of `causal_mask`.

    Attributes:
      ids: `[B, T]` the segment of each token; 0 is padding. None if each row is one
        text, whose padding comes after it and so out of its sight.
    """

    ids: Int[Array, "B T"] | None = None

    def attend(
        self,
        queries: Float[Array, "B T N H"],
        keys: Float[Array, "B T K H"],
        values: Float[Array, "B T K H"],
        implementation: str = "auto",
        mesh: Mesh | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Float[Array, "B T N H"]:
        """Attention by the kernel that `chosen` names, or by `chunked_attention`.

        Queries are unscaled; N is a multiple of K. A token sees the last `window`
        tokens, itself included. For `softcap` see `attention.capped`.
        """
        kernel = chosen(implementation, queries.dtype, queries.shape, mesh, softcap)
        if kernel == "pallas":
            return _pallas(queries, keys, values, self.ids, mesh, window, softcap)
        if kernel == "cudnn":
            if mesh is not None:
                heads = math.gcd(queries.shape[2], keys.shape[2])
                spec = attention_spec(len(queries), heads, mesh, heads_axis=2)
                queries, keys, values = (
                    constrain(x, mesh, spec) for x in (queries, keys, values)
                )
            return fused(queries, keys, values, self.ids, "cudnn", window)
        return chunked_attention(queries, keys, values, self.ids, window, softcap)


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
    ids: Int[Array, "B T"] | None,
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
    if ids is None:
        near = None if window is None else (window - 1, 0)
        return attend(*arrays, is_causal=True, local_window_size=near)
    if length <= _CUDNN_CHUNK:
        mask = causal_mask(ids, window)[:, None]
        return attend(*arrays, mask=mask, is_causal=True)
    return in_chunks(
        lambda *chunk: attend(*chunk[:3], mask=chunk[3][:, None]),
        *arrays,
        ids,
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


def chunked_attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    ids: Int[Array, "B T"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Each token attends to itself and the earlier tokens of its segment.

    Queries are unscaled; N is a multiple of K. Without `ids` every row is one segment.
    A token sees the last `window` tokens, itself included. Scores are
    `attention.capped`.

    On a CPU forward and backward take less than half the time of `attention.attention`:
    XLA multiplies batches of bfloat16 matrices fast there if the result is float32 and
    the sums run over the last axis of the first operand. The gradients of keys and
    values sum over its first axis, so that it is transposed in memory before.
    """
    batch, length, num_heads, width = queries.shape
    kv_heads = keys.shape[2]
    folded = queries.reshape(batch, length, kv_heads, -1, width) * width**-0.5
    parts = max(2, -(-length // _CHUNK)) if length >= _SHORTEST else 1
    mixed = in_chunks(
        functools.partial(_attend, softcap=softcap),
        folded.swapaxes(1, 2),
        keys.swapaxes(1, 2),
        values.swapaxes(1, 2),
        ids,
        window,
        axis=2,
        size=-(-length // parts),
        recompute=length > _LONG,
    )
    return mixed.swapaxes(1, 2).reshape(batch, length, num_heads, width)


def in_chunks(
    attend: Callable[[Array, Array, Array, Bool[Array, "#B C U"]], Array],
    queries: Array,
    keys: Array,
    values: Array,
    ids: Int[Array, "B T"] | None,
    window: int | None,
    *,
    axis: int,
    size: int,
    recompute: bool,
) -> Array:
    """Calls `attend` with chunks of queries and with the keys that they may see.

    Args:
      attend: attention of C queries to U keys, with a mask of what each query sees.
      queries, keys, values: arrays with the tokens along `axis`.
      size: C; the last chunk may be shorter.
      recompute: whether gradients compute the scores once more, which are not kept.
    """
    length = queries.shape[axis]

    def cut(array: Array, begin: int, end: int, axis: int = axis) -> Array:
        return jax.lax.slice_in_dim(array, begin, end, axis=axis)

    def chunk(part: Array, begin: Int[Array, ""], low: int, high: int) -> Array:
        at, seen = begin + jnp.arange(part.shape[axis])[:, None], jnp.arange(low, high)
        mask = (seen <= at)[None]
        if window is not None:
            mask &= at - seen < window
        if ids is not None:
            own = jax.lax.dynamic_slice_in_dim(ids, begin, part.shape[axis], axis=1)
            mask &= own[:, :, None] == cut(ids, low, high, 1)[:, None]
        return attend(part, cut(keys, low, high), cut(values, low, high), mask)

    if recompute:
        chunk = jax.checkpoint(chunk, static_argnums=(2, 3))
    full = length // size
    groups = min(full, _GROUPS)
    bounds = [full * group // groups * size for group in range(groups + 1)]
    mixed = []
    for begin, end in itertools.pairwise([*bounds, *[length] * (length % size > 0)]):
        part, count = cut(queries, begin, end), -(-(end - begin) // size)
        # cuDNN needs an even number of keys; the mask hides those outside the window.
        low = 0 if window is None else max(0, begin + 1 - window) // _EVEN * _EVEN
        if count == 1:
            mixed.append(chunk(part, jnp.int32(begin), low, end))
            continue
        shape = (*part.shape[:axis], count, size, *part.shape[axis + 1 :])
        rows = jnp.moveaxis(part.reshape(shape), axis, 0)
        starts = begin + size * jnp.arange(count)
        rows = jax.lax.map(
            lambda x, low=low, end=end: chunk(x[0], x[1], low, end), (rows, starts)
        )
        mixed.append(jnp.moveaxis(rows, 0, axis).reshape(part.shape))
    return jnp.concatenate(mixed, axis=axis)


def _attend(
    queries: Float[Array, "B K C G H"],
    keys: Float[Array, "B K U H"],
    values: Float[Array, "B K U H"],
    mask: Bool[Array, "#B C U"],
    softcap: float | None,
) -> Float[Array, "B K C G H"]:
    batch, heads, _, group, width = queries.shape
    # The queries that share a key-value head are rows of one matrix.
    scores = _scores(queries.reshape(batch, heads, -1, width), keys)
    mask = jnp.repeat(mask, group, axis=1)[:, None]
    scores = jnp.where(mask, capped(scores, softcap), -jnp.inf)
    # Softmax does not depend on the peak, so no gradient flows through it.
    peak = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    weights /= weights.sum(-1, keepdims=True)
    return _mixed(weights.astype(values.dtype), values).reshape(queries.shape)


@jax.custom_vjp
def _scores(
    rows: Float[Array, "B K M H"], keys: Float[Array, "B K U H"]
) -> Float[Array, "B K M U"]:
    """`rows @ keys.T`, float32."""
    return _product("BKMH,BKUH->BKMU", rows, keys)


def _scores_backward(
    operands: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    rows, keys = operands
    gradient = gradient.astype(rows.dtype)
    by_keys = _product("BKUM,BKMH->BKUH", _transposed(gradient), rows)
    return (
        _product("BKMU,BKUH->BKMH", gradient, keys).astype(rows.dtype),
        by_keys.astype(keys.dtype),
    )


_scores.defvjp(lambda rows, keys: (_scores(rows, keys), (rows, keys)), _scores_backward)


@jax.custom_vjp
def _mixed(
    weights: Float[Array, "B K M U"], values: Float[Array, "B K U H"]
) -> Float[Array, "B K M H"]:
    """`weights @ values`, in their dtype."""
    return _product("BKMU,BKUH->BKMH", weights, values).astype(values.dtype)


def _mixed_backward(
    operands: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    weights, values = operands
    return (
        _product("BKMH,BKUH->BKMU", gradient, values).astype(weights.dtype),
        _product("BKUM,BKMH->BKUH", _transposed(weights), gradient).astype(
            values.dtype
        ),
    )


_mixed.defvjp(
    lambda weights, values: (_mixed(weights, values), (weights, values)),
    _mixed_backward,
)


def _product(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _transposed(matrices: Float[Array, "B K M U"]) -> Float[Array, "B K U M"]:
    """Transposes in memory: folded into a product, it takes several times as long."""
    return jax.lax.optimization_barrier(matrices.swapaxes(-1, -2))
