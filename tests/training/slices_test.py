"""Meshes over several TPU slices; eight CPU devices stand for the chips."""

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models import partitioning
from bpd_jax.models.partitioning import MeshConfig
from bpd_jax.training import slices


@pytest.fixture
def two_slices(monkeypatch):
    """Devices with odd numbers are of another slice than those with even ones."""
    monkeypatch.setattr(slices, "slice_of", lambda device: device.id % 2)


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
    mesh = slices.make_mesh(config)
    assert mesh.axis_names == ("data", "fsdp", "model")
    numbers = np.vectorize(lambda device: device.id % 2)(mesh.devices)
    half = mesh.shape["data"] // 2
    assert (numbers[:half] == 0).all()
    assert (numbers[half:] == 1).all()
    assert {device.id for device in mesh.devices.flat} == set(range(8))


def test_single_slice_has_the_default_layout():
    config = MeshConfig(data=2, fsdp=2, model=2)
    mesh, default_mesh = slices.make_mesh(config), partitioning.make_mesh(config)
    assert (mesh.devices == default_mesh.devices).all()


def test_parameters_are_not_sharded_across_slices(two_slices):
    with pytest.raises(UserError, match=r"data = 1 is not a multiple of the 2 TPU sli"):
        slices.make_mesh(MeshConfig(data=-1, fsdp=8))
