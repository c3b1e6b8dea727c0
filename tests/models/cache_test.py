import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.cache import KeyValues, KVCache, commit, empty_cache, numbers
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import parameter_shapes
from bpd_jax.models.transformer_config import TransformerConfig


def test_every_layer_and_head_is_stored_at_its_own_index():
    config = TransformerConfig(9, num_layers=3, d_model=8, d_ff=8, num_heads=2)
    cache = empty_cache(config, batch=2, slots=6)
    assert cache.keys[0].shape == (2, 2, 4, 6)
    assert cache.values[0].shape == (2, 2, 6, 4)
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 3, 2, 3, 2, 4)).astype(np.float32)
    cache = cache.replace(lengths=jnp.array([0, 2]))
    cache = commit(cache, KeyValues(keys, values), jnp.array([3, 3]))
    for layer in range(3):
        for row, begin in enumerate([0, 2]):
            slots = slice(begin, begin + 3)
            stored = cache.keys[layer][row, :, :, slots]
            np.testing.assert_array_equal(stored.transpose(2, 0, 1), keys[layer, row])
            stored = cache.values[layer][row, :, slots]
            np.testing.assert_array_equal(stored.swapaxes(0, 1), values[layer, row])


def test_commit_updates_a_donated_sharded_cache_without_collectives():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    heads = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "model"))
    block = NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp"), None, "model"))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    abstract = jax.ShapeDtypeStruct
    keys = abstract((8, 4, 8, 64), jnp.float32, sharding=heads)
    values = abstract((8, 4, 64, 8), jnp.float32, sharding=heads)
    counts = abstract((8,), jnp.int32, sharding=rows)
    cache = KVCache((keys, keys), (values, values), counts)
    new = KeyValues(*[abstract((2, 8, 5, 4, 8), jnp.float32, sharding=block)] * 2)
    compiled = jax.jit(commit, donate_argnums=0).lower(cache, new, counts).compile()
    text = compiled.as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "permute"):
        assert f" {collective}(" not in text
    per_device = 4 * np.prod(keys.shape) * 4 // 8
    assert compiled.memory_analysis().alias_size_in_bytes >= per_device


def test_no_product_of_a_pass_copies_cache_or_weights():
    """Plain decoding reads memory and little else, so a copy would double its time."""
    config = TransformerConfig(48, num_layers=2, d_model=32, d_ff=40, num_heads=4)
    model = Model(BlockwiseConfig(config))
    row = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    arguments = (
        model.with_params(parameter_shapes(model.config)),
        row,
        row,
        jax.ShapeDtypeStruct((1, 1, 1), bool),
        jax.eval_shape(lambda: model.empty_cache(1, 56)),
    )
    text = jax.jit(Model.forward).lower(*arguments).compile().as_text()
    # 56 slots or 32 × 32 numbers: nothing else that is copied is as large.
    for line in text.splitlines():
        match = re.search(r"= f32\[([\d,]+)\]\S* (?:copy|transpose|slice)\(", line)
        if match:
            assert math.prod(map(int, match[1].split(","))) < 32 * 32, line


def test_bits_of_bfloat16_are_committed_and_read():
    config = TransformerConfig(
        num_layers=1, d_model=4, num_heads=1, d_ff=4, vocab_size=8, max_length=8
    )
    cache = empty_cache(config, 2, 6, "uint16")
    block = jnp.asarray([[0.5, -3.0], [1.2, 0.0]], jnp.float32)
    new = jnp.broadcast_to(block[None, :, :, None, None], (1, 2, 2, 1, 4))
    cache = commit(cache, KeyValues(new, -new), jnp.array([2, 1]))
    assert cache.keys[0].dtype == cache.values[0].dtype == jnp.uint16
    stored = numbers(cache.keys[0])[:, 0, 0, :2]
    np.testing.assert_array_equal(stored, block.astype(jnp.bfloat16))
    np.testing.assert_array_equal(numbers(cache.values[0])[:, 0, :2, 0], -stored)
