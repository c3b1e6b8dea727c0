import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bpd_jax.models.cache import KeyValues, KVCache, commit
from bpd_jax.models.partitioning import MeshConfig, make_mesh


def cache_of(values, lengths):
    array = jnp.asarray(values, jnp.float32)[None, :, :, None, None]
    return KVCache(array, -array, jnp.asarray(lengths))


def test_rows_commit_different_lengths_at_their_own_places():
    cache = cache_of([[1, 2, 3] + [0] * 6, [4] + [0] * 8], [3, 1])
    block = jnp.asarray([[5, 6, 90], [7, 8, 9]], jnp.float32)[None, :, :, None, None]
    cache = commit(cache, KeyValues(block, -block), jnp.array([2, 3]))
    assert cache.lengths.tolist() == [5, 4]
    rows = np.asarray(cache.keys)[0, :, :, 0, 0]
    assert rows[0, :5].tolist() == [1, 2, 3, 5, 6]
    assert rows[1, :4].tolist() == [4, 7, 8, 9]
    np.testing.assert_array_equal(cache.values, -cache.keys)
    # A rejected slot (90) is overwritten by the next commit.
    cache = commit(cache, KeyValues(block, -block), jnp.array([1, 0]))
    assert np.asarray(cache.keys)[0, 0, 5, 0, 0] == 5
    assert cache.lengths.tolist() == [6, 4]


def test_commit_updates_a_donated_sharded_cache_without_collectives():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    spec = PartitionSpec(None, ("data", "fsdp"), None, "model", None)
    sharding = NamedSharding(mesh, spec)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    shape, block = (2, 8, 64, 4, 8), (2, 8, 5, 4, 8)
    abstract = jax.ShapeDtypeStruct
    cache = KVCache(
        abstract(shape, jnp.float32, sharding=sharding),
        abstract(shape, jnp.float32, sharding=sharding),
        abstract((8,), jnp.int32, sharding=rows),
    )
    new = KeyValues(*[abstract(block, jnp.float32, sharding=sharding)] * 2)
    counts = abstract((8,), jnp.int32, sharding=rows)
    compiled = jax.jit(commit, donate_argnums=0).lower(cache, new, counts).compile()
    text = compiled.as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "permute"):
        assert f" {collective}(" not in text
    per_device = 2 * np.prod(shape) * 4 // 8
    assert compiled.memory_analysis().alias_size_in_bytes >= per_device
