import collections
import shutil

import jax
import pytest

from bpd_jax.errors import UserError
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


def test_a_device_holds_its_share(model, abstract):
    parameters = sum(x.size for x in jax.tree.leaves(abstract.params))
    # Each parameter has two moments; a few counters come on top.
    assert 0 <= state_bytes(abstract) - 3 * 4 * parameters <= 32
    # Nearly all arrays are cut into four; norms into two, positions not at all.
    share = bytes_per_device(abstract) / state_bytes(abstract)
    assert 1 / 4 < share < 1 / 2
    alone = make_mesh(MeshConfig(data=8))
    whole = abstract_state(model, OPTIMIZER, alone)
    assert bytes_per_device(whole) == state_bytes(whole) == state_bytes(abstract)


def test_a_full_disk_is_told_with_the_numbers(abstract, tmp_path, monkeypatch):
    size = state_bytes(abstract)
    free = [4 * size]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free[0]))
    folder = tmp_path / "run" / "checkpoints"
    check_space(folder, abstract, keep=2)
    free[0] -= 1
    with pytest.raises(UserError, match=r"has 0.0 GB free .* = 2 of them"):
        check_space(folder, abstract, keep=2)
    # What a kill left half written gives its room back.
    torn = folder / "4.orbax-checkpoint-tmp" / "params"
    torn.mkdir(parents=True)
    (torn / "data").write_bytes(b"x" * 10)
    check_space(folder, abstract, keep=2)
    shutil.rmtree(torn.parent)
    # What is there already needs no more room.
    (folder / "3").mkdir(parents=True)
    check_space(folder, abstract, keep=2)


@pytest.mark.parametrize("place", ["run", "run/checkpoints"])
def test_a_file_in_the_way_is_told_before_anything_is_made(
    train_config, tmp_path, place
):
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("in the way")
    with pytest.raises(UserError, match=r"it is a file|is not a folder"):
        train(train_config, tmp_path / "run")
    assert path.read_text() == "in the way"
    assert not (tmp_path / "run" / "data").exists()


def test_a_folder_that_takes_no_file_is_told(abstract, tmp_path, monkeypatch):
    def read_only(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(UserError, match=r"cannot write .*: Read-only file system"):
        check_space(tmp_path / "checkpoints", abstract, keep=2)
