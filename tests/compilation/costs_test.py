import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bpd_jax.compilation.collectives import Collective
from bpd_jax.compilation.costs import costs_of
from bpd_jax.compilation.hlo import parse
from bpd_jax.models.partitioning import MeshConfig, make_mesh

HEADER = "HloModule jit_f, num_partitions=8\n\n"


def costs(text, devices=8):
    return costs_of(parse(HEADER + text), devices)


def collective(kind, nbytes, size):
    return Collective(kind, nbytes, 0, (tuple(range(size)),), "1")


@pytest.mark.parametrize(
    "kind, sent",
    [
        ("all-gather", 300),  # three other pieces of 100 bytes
        ("all-reduce", 150),  # 3/4 of 100 bytes, out and back
        ("reduce-scatter", 75),
        ("all-to-all", 75),
        ("collective-permute", 100),
    ],
)
def test_bytes_that_a_collective_sends(kind, sent):
    assert collective(kind, 100, 4).sent == sent
    assert collective(kind, 100, 1).sent == 0


def test_flops_of_a_loop_count_for_every_iteration():
    def f(w, x):
        def layer(c, w):
            return jnp.tanh(c @ w), None

        return jax.lax.scan(layer, x, w)[0]

    compiled = jax.jit(f).lower(jnp.ones((5, 64, 64)), jnp.ones((16, 64))).compile()
    total = costs_of(parse(compiled.as_text()), 1)
    assert total.flops == 5 * 2 * 16 * 64 * 64
    # An iteration reads the weights of its layer, not those of all layers.
    weights = 5 * 64 * 64 * 4
    assert weights <= total.hbm_bytes < 5 * weights


def test_collectives_of_a_real_program():
    """Rows over 8 devices: sums are all-reduced, and sharded weights all-gathered."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    sharded = NamedSharding(mesh, PartitionSpec("fsdp"))
    replicated = NamedSharding(mesh, PartitionSpec())

    def f(w, x):
        return x @ w, x.sum(0)

    shapes = (
        jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharded),
        jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=sharded),
    )
    compiled = jax.jit(f, out_shardings=(sharded, replicated)).lower(*shapes).compile()
    total = costs_of(parse(compiled.as_text()), 8)
    sizes = {x.kind: (x.nbytes, x.group_size, n) for x, n in total.collectives.items()}
    assert sizes == {
        "all-gather": (8 * 32 * 4, 8, 1),
        "all-reduce": (64 * 4, 8, 1),
    }
    assert total.flops == 2 * 2 * 64 * 32
    assert total.times(3).collectives == dict.fromkeys(total.collectives, 3)


def test_a_collective_spread_over_fusions_counts_once():
    """As the TPU compiler overlaps one with a product of [64,64] matrices."""
    total = costs("""\
%start (p: f32[8]) -> (f32[8], f32[64]) {
  %p = f32[8]{0} parameter(0)
  %begun = f32[64]{0} all-gather(%p), channel_id=9, replica_groups=[1,8]<=[8],
    dimensions={0}
  ROOT %s = (f32[8]{0}, f32[64]{0:S(1)}) custom-call(%begun),
    custom_call_target="AsyncCollectiveStart"
}

%beside (p: f32[8], q: f32[64], x: f32[64,64]) -> (f32[64], f32[64], f32[64,64]) {
  %p = f32[8]{0} parameter(0)
  %q = f32[64]{0:S(1)} parameter(1)
  %x = f32[64,64]{1,0} parameter(2)
  %again = f32[64]{0:S(1)} all-gather(%p), channel_id=9, replica_groups=[1,8]<=[8],
    dimensions={0}
  %y = f32[64,64]{1,0} convolution(%x, %x), dim_labels=bf_io->bf
  ROOT %t = (f32[64]{0:S(1)}, f32[64]{0:S(1)}, f32[64,64]{1,0}) tuple(%again, %q, %y)
}

ENTRY %main (a: f32[8], x: f32[64,64]) -> f32[64,64] {
  %a = f32[8]{0} parameter(0)
  %x = f32[64,64]{1,0} parameter(1)
  %s = (f32[8]{0}, f32[64]{0:S(1)}) fusion(%a), kind=kCustom, calls=%start
  %q = f32[64]{0:S(1)} get-tuple-element(%s), index=1
  %f = (f32[64]{0:S(1)}, f32[64]{0:S(1)}, f32[64,64]{1,0}) fusion(%a, %q, %x),
    kind=kCustom, calls=%beside
  ROOT %y = f32[64,64]{1,0} get-tuple-element(%f), index=2
}
""")
    [(kind, times)] = total.collectives.items()
    assert (kind.kind, kind.nbytes, times) == ("all-gather", 32, 1)
    assert total.flops == 2 * 64**3
    # The collective's operand and result; then the matrix read and its square written.
    assert total.hbm_bytes == 32 + 256 + 2 * 64 * 64 * 4


def test_all_reduce_followed_by_a_slice_is_a_reduce_scatter():
    total = costs("""\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%all-reduce-scatter (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  %sum = f32[64]{0} all-reduce(%p), channel_id=2, replica_groups=[1,8]<=[8],
    to_apply=%add
  %place = s32[] constant(0)
  ROOT %mine = f32[8]{0} dynamic-slice(%sum, %place), dynamic_slice_sizes={8}
}

ENTRY %main (a: f32[64]) -> f32[8] {
  %a = f32[64]{0} parameter(0)
  ROOT %mine = f32[8]{0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter
}
""")
    [(kind, times)] = total.collectives.items()
    assert (kind.kind, kind.sent, times) == ("reduce-scatter", 256 * 7 / 8, 1)
    assert total.hbm_bytes == 256 + 32


def test_fusions_access_only_slices_and_updates():
    total = costs("""\
%slices (p: f32[5,100], i: s32[]) -> f32[1,100] {
  %p = f32[5,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %s = f32[1,100]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,100}
}

%around (p: f32[5,100], i: s32[]) -> f32[100] {
  %p = f32[5,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %part = f32[1,100]{1,0} fusion(%p, %i), kind=kLoop, calls=%slices
  ROOT %flat = f32[100]{0} bitcast(%part)
}

%view (p: f32[100]) -> f32[1,100] {
  %p = f32[100]{0} parameter(0)
  ROOT %v = f32[1,100]{1,0} bitcast(%p)
}

%squares (p: f32[100]) -> f32[1,100] {
  %p = f32[100]{0} parameter(0)
  %v = f32[1,100]{1,0} fusion(%p), kind=kLoop, calls=%view
  ROOT %s = f32[1,100]{1,0} multiply(%v, %v)
}

%updates (p: f32[5,100], u: f32[1,100], i: s32[]) -> f32[5,100] {
  %p = f32[5,100]{1,0} parameter(0)
  %u = f32[1,100]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %w = f32[5,100]{1,0} dynamic-update-slice(%p, %u, %i, %zero)
}

ENTRY %main (a: f32[5,100], i: s32[]) -> f32[5,100] {
  %a = f32[5,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,100]{1,0} fusion(%a, %i), kind=kLoop, calls=%slices
  %flat = f32[100]{0} fusion(%a, %i), kind=kLoop, calls=%around
  %square = f32[1,100]{1,0} fusion(%flat), kind=kLoop, calls=%squares
  ROOT %b = f32[5,100]{1,0} fusion(%a, %row, %i), kind=kLoop, calls=%updates
}
""")
    # A row read and written, four times, and the number three times.
    assert total.hbm_bytes == 4 * 2 * 400 + 3 * 4


def test_asynchronous_copies_and_slices():
    """Into fast memory: what is copied is read once, in full or in part."""
    total = costs("""\
ENTRY %main (a: f32[5,100]) -> f32[1,100] {
  %a = f32[5,100]{1,0} parameter(0)
  %c = (f32[5,100]{1,0:S(1)}, f32[5,100]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %whole = f32[5,100]{1,0:S(1)} copy-done(%c)
  %s = (f32[5,100]{1,0}, f32[1,100]{1,0:S(1)}, u32[]{:S(2)}) slice-start(%a),
    slice={[0:1], [0:100]}
  ROOT %row = f32[1,100]{1,0:S(1)} slice-done(%s)
}
""")
    assert total.hbm_bytes == 2000 + 400


def test_batched_matmul_written_as_a_convolution():
    """Twelve products [16,32] x [32,8]; the window meets padding elsewhere."""
    total = costs("""\
ENTRY %main (a: f32[12,16,32], b: f32[12,32,8]) -> f32[12,16,8] {
  %a = f32[12,16,32]{2,1,0:S(1)} parameter(0)
  %b = f32[12,32,8]{2,1,0:S(1)} parameter(1)
  ROOT %c = f32[12,16,8]{2,1,0:S(1)} convolution(%a, %b),
    window={size=12 stride=11 pad=0_0 lhs_dilate=12}, dim_labels=0bf_0io->0bf
}
""")
    assert total.flops == 12 * 2 * 16 * 32 * 8
    assert total.hbm_bytes == 0


def test_the_flops_of_splash_attention():
    """Two blocks of 256: three of the four are computed, in two products."""
    total = costs("""\
ENTRY %main (m: s8[1,1,1], q: bf16[2,4,512,64]) -> bf16[2,4,512,64] {
  %m = s8[1,1,1]{2,1,0} parameter(0)
  %q = bf16[2,4,512,64]{3,2,1,0} parameter(1)
  ROOT %splash_mha_fwd.3 = bf16[2,4,512,64]{3,2,1,0} custom-call(%m, %q, %q, %q),
    custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256, \\"block_kv\\": 256}"
}}
}
""")
    assert total.flops == 2 * 2 * (2 * 4) * 512 * 512 * 64 * 3 / 4
    assert total.kernels == {"splash_mha_fwd": 1}


def test_bytes_sent_to_other_slices():
    """As the TPU compiler writes an all-reduce among slices, inside a loop or not."""
    total = costs(
        """ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %t = token[] after-all()
  %send = (f32[4,8]{1,0}, u32[], token[]) send(%a, %t), channel_id=2, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name=\
"xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[4,8]{1,0}, u32[], token[]) recv(%t), channel_id=1, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name=\
"xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[4,8]{1,0}, token[]) recv-done(%recv), channel_id=1
  ROOT %r = f32[4,8]{1,0} get-tuple-element(%recv-done), index=0
}
"""
    )
    assert total.network == {"ALL_REDUCE": 4 * 8 * 4}
    assert total.times(3).network == {"ALL_REDUCE": 3 * 4 * 8 * 4}
    assert (total + total).network == {"ALL_REDUCE": 2 * 4 * 8 * 4}
    assert not total.collectives


MATRIX = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    "branches",
    [
        "true_computation=%large, false_computation=%small",
        "branch_computations={%large, %small}",
    ],
)
def test_conditional_counts_as_its_cheaper_branch(branches):
    total = costs(
        f"""
%small (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  ROOT %d = f32[8,8]{{1,0}} dot(%x, %x), {MATRIX}
}}

%large (y: f32[64,64]) -> f32[8,8] {{
  %y = f32[64,64]{{1,0}} parameter(0)
  %e = f32[64,64]{{1,0}} dot(%y, %y), {MATRIX}
  ROOT %s = f32[8,8]{{1,0}} slice(%e), slice={{[0:8], [0:8]}}
}}

ENTRY %main (p: pred[], a: f32[8,8], b: f32[64,64]) -> f32[8,8] {{
  %p = pred[] parameter(0)
  %a = f32[8,8]{{1,0}} parameter(1)
  %b = f32[64,64]{{1,0}} parameter(2)
  ROOT %c = f32[8,8]{{1,0}} conditional(%p, %b, %a), {branches}
}}
"""
    )
    assert total.flops == 2 * 8 * 8 * 8


@pytest.mark.parametrize(
    "suffix, products", [("ScaleBiasSoftmax", 2), ("ScaleBiasSoftmaxBackward", 5)]
)
@pytest.mark.parametrize("mask, share", [("CAUSAL", 0.5), ("NO_MASK", 1.0)])
@pytest.mark.parametrize("separators", [None, (",", ":")], ids=["wide", "compact"])
def test_flops_of_attention_by_cudnn(suffix, products, mask, share, separators):
    shape = {"element_type": "BF16", "dimensions": ["2", "4", "64", "64"]}
    settings = {"intermediate_tensor_shape": shape, "mask_type": mask}
    config = {"cudnn_fmha_backend_config": settings}
    config = json.dumps(config, separators=separators)
    total = costs(
        f"""
ENTRY %main (q: bf16[2,64,4,16]) -> bf16[2,4,64,16] {{
  %q = bf16[2,64,4,16]{{3,2,1,0}} parameter(0)
  ROOT %a = bf16[2,4,64,16]{{3,2,1,0}} custom-call(%q, %q, %q), """
        f"""custom_call_target="__cudnn$fmha{suffix}", backend_config={config}
}}
"""
    )
    pairs = 2 * 4 * 64 * 64
    assert total.flops == share * products * 2 * pairs * 16
    assert total.kernels == {f"__cudnn$fmha{suffix}": 1}


def test_flops_of_a_product_by_cublas():
    axes = {"lhs_contracting_dimensions": ["0"], "rhs_contracting_dimensions": ["1"]}
    config = json.dumps({"gemm_backend_config": {"dot_dimension_numbers": axes}})
    total = costs(
        """
ENTRY %main (a: bf16[32,8], b: bf16[16,32]) -> f32[8,16] {
  %a = bf16[32,8]{1,0} parameter(0)
  %b = bf16[16,32]{1,0} parameter(1)
  %c = (f32[8,16]{1,0}, s8[100]{0}) custom-call(%a, %b), """
        f"""custom_call_target="__cublas$lt$matmul", backend_config={config}
  ROOT %d = f32[8,16]{{1,0}} get-tuple-element(%c), index=0
}}
"""
    )
    assert total.flops == 2 * 8 * 16 * 32
    assert total.kernels == {"__cublas$lt$matmul": 1}
