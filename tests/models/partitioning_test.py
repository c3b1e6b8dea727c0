import dataclasses
import functools

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models import mesh as meshes
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.parameters import init_boxed
from bpd_jax.models.partitioning import with_shardings
from bpd_jax.models.transformer_config import TransformerConfig

CONFIG = BlockwiseConfig(
    TransformerConfig(24, 1, 16, 32, num_heads=4, max_length=8, gated=True),
    BlockHeadsConfig(num_heads=3, hidden=8),
)


def test_axes_that_the_mesh_does_not_divide_are_not_sharded():
    """Four devices share four query heads, and each has both key-value heads.

    The paper's vocabulary is not divided; see `tests/training/partition_specs_test.py`.
    """
    trunk = dataclasses.replace(CONFIG.trunk, num_kv_heads=2)
    boxed = jax.eval_shape(
        functools.partial(init_boxed, BlockwiseConfig(trunk)), jax.random.key(0)
    )
    trunk_shapes = with_shardings(boxed, make_mesh(MeshConfig(model=4)))["trunk"]
    attention = trunk_shapes["attention_0"]
    assert "model" in attention["query"]["kernel"].sharding.spec
    assert "model" not in attention["key"]["kernel"].sharding.spec
    assert tuple(trunk_shapes["embedding"].sharding.spec) == ("model", "fsdp")


def test_a_mesh_takes_all_devices_it_is_given():
    assert make_mesh(MeshConfig(model=4)).shape == {"data": 2, "fsdp": 1, "model": 4}
    half = jax.devices()[4:]
    mesh = make_mesh(MeshConfig(fsdp=2), half)
    assert mesh.shape == {"data": 2, "fsdp": 2, "model": 1}
    assert list(mesh.devices.flat) == half
    with pytest.raises(UserError, match="there are 4 devices"):
        make_mesh(MeshConfig(data=8), half)


@pytest.fixture
def two_slices(monkeypatch):
    """Devices with odd numbers are of another TPU slice than those with even ones."""
    monkeypatch.setattr(meshes, "slice_of", lambda device: device.id % 2)


@pytest.mark.parametrize(
    "config",
    [
        MeshConfig(),
        MeshConfig(data=-1, fsdp=4),
        MeshConfig(data=2, fsdp=2, model=2),
        MeshConfig(data=4, model=2),
    ],
)
def test_only_the_data_axis_crosses_slices(two_slices, config):
    mesh = make_mesh(config)
    numbers = np.vectorize(lambda device: device.id % 2)(mesh.devices)
    half = mesh.shape["data"] // 2
    assert (numbers[:half] == 0).all()
    assert (numbers[half:] == 1).all()
    assert {device.id for device in mesh.devices.flat} == set(range(8))


def test_parameters_are_not_sharded_across_slices(two_slices):
    with pytest.raises(UserError, match=r"data = 1 is not a multiple of the 2 TPU sli"):
        make_mesh(MeshConfig(data=-1, fsdp=8))
