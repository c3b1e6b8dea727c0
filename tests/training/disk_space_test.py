import collections
import shutil

import jax
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.disk_space import bytes_per_device, check_space, state_bytes
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.state import abstract_state
from bpd_jax.training.trainer import train

Usage = collections.namedtuple("Usage", "total used free")
OPTIMIZER = make_optimizer(OptimizerConfig(1e-2), 10)


@pytest.fixture(scope="module")
def abstract(model):
    return abstract_state(model, OPTIMIZER, make_mesh(MeshConfig(2, 2, 2)))


def test_bytes_per_device_of_a_sharded_state(model, abstract):
    parameters = sum(x.size for x in jax.tree.leaves(abstract.params))
    # Each parameter has two moments; a few counters come on top.
    assert 0 <= state_bytes(abstract) - 3 * 4 * parameters <= 32
    # Nearly all arrays are sharded four ways, norms two ways, positions not at all.
    share = bytes_per_device(abstract) / state_bytes(abstract)
    assert 1 / 4 < share < 1 / 2
    data_mesh = make_mesh(MeshConfig(data=8))
    replicated = abstract_state(model, OPTIMIZER, data_mesh)
    assert (
        bytes_per_device(replicated) == state_bytes(replicated) == state_bytes(abstract)
    )


def test_full_disk_is_reported_with_sizes(abstract, tmp_path, monkeypatch):
    size = state_bytes(abstract)
    free = [4 * size]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free[0]))
    folder = tmp_path / "run" / "checkpoints"
    check_space(folder, abstract, keep=2)
    free[0] -= 1
    with pytest.raises(UserError, match=r"has 0.0 GB free .* = 2 of them"):
        check_space(folder, abstract, keep=2)
    # Incomplete checkpoints of a killed run count as free space.
    incomplete = folder / "4.orbax-checkpoint-tmp" / "params"
    incomplete.mkdir(parents=True)
    (incomplete / "data").write_bytes(b"x" * 10)
    check_space(folder, abstract, keep=2)
    shutil.rmtree(incomplete.parent)
    # Existing checkpoints need no further space.
    (folder / "3").mkdir(parents=True)
    check_space(folder, abstract, keep=2)


@pytest.mark.parametrize("name", ["run", "run/checkpoints"])
def test_file_in_place_of_a_folder_is_reported_before_any_write(
    train_config, tmp_path, name
):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("in the way")
    with pytest.raises(UserError, match=r"it is a file|is not a folder"):
        train(train_config, tmp_path / "run")
    assert path.read_text() == "in the way"
    assert not (tmp_path / "run" / "data").exists()


def test_read_only_folder_is_reported(abstract, tmp_path, monkeypatch):
    def read_only(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(UserError, match=r"cannot write .*: Read-only file system"):
        check_space(tmp_path / "checkpoints", abstract, keep=2)
