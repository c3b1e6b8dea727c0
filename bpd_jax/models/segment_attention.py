"""Causal attention within the segments of packed rows, as training needs it.

Flash attention on GPUs (cuDNN) and TPUs (jax's Pallas kernel `splash_attention`), XLA
elsewhere, on CPUs through `cpu.segment_attention`. Padding is a segment like any other,
so that no row of scores is empty.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.models import cpu
from bpd_jax.models.attention import Segments, attention, causal_mask
from bpd_jax.models.partitioning import BATCH_SPEC, constrain

# Block sizes of the Pallas kernel, in tokens; rows are padded to a multiple of the
# last one.
_BLOCKS = (512, 256, 128)


def segment_attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    segments: Segments,
    implementation: str = "auto",
    mesh: Mesh | None = None,
) -> Float[Array, "B T N H"]:
    """Each token attends to itself and the earlier tokens of its segment.

    Args:
      queries: unscaled.
      keys: keys of K heads; N is a multiple of K.
      values: values of the same K heads.
      segments: the segment of every token.
      implementation: see `ComputeConfig.attention`.
      mesh: devices that split rows and heads; None for one device.
    """
    kernel = chosen(implementation, queries.dtype, queries.shape, mesh)
    if kernel == "pallas":
        return _pallas(queries, keys, values, segments.ids, mesh)
    if kernel == "cudnn":
        spec = _spec(queries.shape[2], keys.shape[2], mesh)
        queries, keys, values = (
            constrain(x, mesh, spec) for x in (queries, keys, values)
        )
        return fused(queries, keys, values, segments, "cudnn")
    plain = cpu.segment_attention if cpu.on_cpu(mesh) else attention
    return plain(queries, keys, values, causal_mask(segments.ids))


def chosen(
    implementation: str,
    dtype: jnp.dtype,
    shape: tuple[int, ...],
    mesh: Mesh | None = None,
) -> str:
    """Resolves `auto` to an implementation: `xla`, `cudnn` or `pallas`.

    Args:
      implementation: see `ComputeConfig.attention`.
      dtype: of the queries.
      shape: of the queries, [B, T, N, H].
      mesh: the devices; None for those of jax.

    Raises:
      UserError: cudnn was asked for and cannot compute this.
    """
    if implementation == "cudnn":
        obstacle = _cudnn_obstacle(dtype, shape, mesh)
        if obstacle is not None:
            raise UserError(
                f"ComputeConfig.attention = 'cudnn' {obstacle}, or set attention = "
                "'auto' or 'xla'."
            )
    if implementation != "auto":
        return implementation
    if _device(mesh).platform == "tpu":
        return "pallas"
    # Also on a GPU without cuDNN's flash attention, `auto` is plain XLA.
    return "xla" if _cudnn_obstacle(dtype, shape, mesh) else "cudnn"


def _cudnn_obstacle(
    dtype: jnp.dtype, shape: tuple[int, ...], mesh: Mesh | None
) -> str | None:
    """Why cuDNN's flash attention does not support this, and the remedy; or None.

    The sizes are those that `jax.nn.dot_product_attention` takes with a gradient and a
    mask, on the oldest GPUs that it runs on.
    """
    _, length, _, width = shape
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cannot compute in {dtype}: set TransformerConfig.dtype = 'bfloat16'"
    device = _device(mesh)
    # Other makers' GPUs have names there, such as gfx942.
    capability = str(getattr(device, "compute_capability", ""))
    major = capability.partition(".")[0]
    if device.platform != "gpu" or not major.isdigit() or int(major) < 8:
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
    if length % 2:
        return f"cannot compute rows of {length} tokens: make TrainConfig.length even"
    return None


def fused(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    segments: Segments,
    implementation: Literal["xla", "cudnn"],
) -> Float[Array, "B T N H"]:
    """`jax.nn.dot_product_attention` within segments.

    cuDNN reads the segments as one `[B, 1, T, T]` bias for all heads of a row; scores
    stay in the kernel, and those of later tokens are not computed.
    """
    same = segments.ids[:, None, :, None] == segments.ids[:, None, None, :]
    return jax.nn.dot_product_attention(
        queries, keys, values, mask=same, is_causal=True, implementation=implementation
    )


def _pallas(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    ids: Int[Array, "B T"],
    mesh: Mesh | None,
) -> Float[Array, "B T N H"]:
    """Splash attention on every device's own rows and heads."""
    interpret = _device(mesh).platform != "tpu"
    run = functools.partial(_splash, interpret=interpret)
    if mesh is None or mesh.size == 1:
        return run(queries, keys, values, ids)
    num_heads, kv_heads = queries.shape[2], keys.shape[2]
    spec = _spec(num_heads, num_heads, mesh)
    if spec != _spec(num_heads, kv_heads, mesh):
        # Fewer key-value heads than shards: every query head gets its own copy.
        keys, values = (
            jnp.repeat(x, num_heads // kv_heads, axis=2) for x in (keys, values)
        )
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(spec, spec, spec, BATCH_SPEC),
        out_specs=spec,
        check_vma=False,
    )(queries, keys, values, ids)


def _splash(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    ids: Int[Array, "B T"],
    *,
    interpret: bool,
) -> Float[Array, "B T N H"]:
    # Imported late: the import takes a second, and decoding does not need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length, num_heads, width = queries.shape[1:]
    # Attention is causal, so padding at the end of a row does not affect its tokens.
    missing = -length % _BLOCKS[-1]
    total = length + missing
    block = next(size for size in _BLOCKS if total % size == 0)
    mask = splash.MultiHeadMask([splash.CausalMask((total, total))] * num_heads)
    kernel = splash.make_splash_mha(
        mask,
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
        q_seq_shards=1,
        interpret=interpret,
    )

    def heads_first(x: Array) -> Float[Array, "B n T H"]:
        return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))).swapaxes(1, 2)

    ids = jnp.pad(ids, ((0, 0), (0, missing)))
    mixed = jax.vmap(kernel)(
        heads_first(queries * width**-0.5),
        heads_first(keys),
        heads_first(values),
        splash.SegmentIds(ids, ids),
    )
    return mixed.swapaxes(1, 2)[:, :length].astype(queries.dtype)


def _spec(num_heads: int, kv_heads: int, mesh: Mesh | None) -> PartitionSpec:
    """Rows over the batch's axes; heads over `model`, if it divides both counts."""
    if (
        mesh is None
        or num_heads % mesh.shape["model"]
        or kv_heads % mesh.shape["model"]
    ):
        return PartitionSpec(*BATCH_SPEC, None, None, None)
    return PartitionSpec(*BATCH_SPEC, None, "model", None)


def _device(mesh: Mesh | None) -> jax.Device:
    """The first device; all are of the same kind."""
    return jax.devices()[0] if mesh is None else mesh.devices.flat[0]
