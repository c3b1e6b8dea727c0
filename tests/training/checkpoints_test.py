import contextlib
import functools
import resource
import shutil

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.layers import is_stacked
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.transformer_config import ComputeConfig
from bpd_jax.training.checkpoint_files import DIGESTS
from bpd_jax.training.checkpoints import Checkpoints, best_step, load_parameters
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.run_names import whole_steps
from bpd_jax.training.state import abstract_state, init_state, make_optimizer

OPTIMIZER = make_optimizer(OptimizerConfig(1e-2), 10)


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture(scope="module")
def states(model, one_device):
    """States of steps 3 and 7."""
    abstract = abstract_state(model, OPTIMIZER, one_device)
    return {step: init_state(model, OPTIMIZER, abstract, step) for step in (3, 7)}


@pytest.fixture(scope="module")
def saved(states, tmp_path_factory):
    """A folder with checkpoints 3 and 7, and the state of the latter.

    Its name is a pattern for `glob`, and an encoded one in a URL.
    """
    folder = tmp_path_factory.mktemp("run") / "[v1] 50% #?" / "checkpoints"
    with Checkpoints(folder, keep=2) as checkpoints:
        for step, state in {1: states[7], **states}.items():
            checkpoints.save(step, state, {"given": 10 * step})
    return folder, states[7]


def test_state_and_data_are_restored(saved, model, one_device):
    folder, state = saved
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.latest_step == 7
        abstract = abstract_state(model, OPTIMIZER, one_device)
        restored = checkpoints.restore(abstract)
        data = checkpoints.restore_data()
    assert data == {"given": 70, "best_step": None}
    assert best_step(folder) is None
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_equal(restored, state)
    assert sorted(path.name for path in folder.iterdir()) == ["3", "7"]
    assert sorted(path.parent.name for path in folder.glob(f"*/{DIGESTS}")) == [
        "3",
        "7",
    ]


def test_parameters_are_loaded_without_the_optimizer(saved, states, model):
    folder, state = saved
    assert_equal(load_parameters(folder, model), state.params)
    assert_equal(load_parameters(folder, model, step=3), states[3].params)


def test_stacked_checkpoint_is_loaded_unstacked(model, one_device, tmp_path):
    mesh, compute = make_mesh(MeshConfig(2, 2, 2)), ComputeConfig(scan_layers=True)
    abstract = abstract_state(model, OPTIMIZER, mesh, compute)
    state = init_state(model, OPTIMIZER, abstract, 5, compute)
    assert is_stacked(state.params["trunk"])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
    plain = abstract_state(model, OPTIMIZER, one_device)
    expected = init_state(model, OPTIMIZER, plain, 5).params
    assert_equal(load_parameters(tmp_path, model), expected)


def test_missing_checkpoints_are_reported(saved, model, tmp_path):
    with pytest.raises(UserError, match="nowhere holds no checkpoint"):
        load_parameters(tmp_path / "nowhere", model)
    with pytest.raises(UserError, match="no checkpoint of step 5, only 3, 7"):
        load_parameters(saved[0], model, step=5)
    assert best_step(tmp_path / "nowhere") is None


def test_shape_mismatch_is_reported_with_both_shapes(saved, one_device, make_model):
    folder, _ = saved
    larger_model = make_model(heads=4)
    message = r"checkpoints/7/params .* heads/bias_in is \(2, 8\) there and \(3, 8\)"
    with pytest.raises(UserError, match=message):
        load_parameters(folder, larger_model)
    abstract = abstract_state(larger_model, OPTIMIZER, one_device)
    with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match=message):
        checkpoints.restore(abstract)


def test_optimizer_mismatch_is_reported(saved, model, one_device):
    unclipped = make_optimizer(OptimizerConfig(1e-2, clip_norm=None), 10)
    abstract = abstract_state(model, unclipped, one_device)
    with (
        Checkpoints(saved[0]) as checkpoints,
        pytest.raises(UserError, match="checkpoints/7/optimizer does not fit"),
    ):
        checkpoints.restore(abstract)


def test_a_flipped_bit_is_noticed(saved, model, tmp_path):
    """Orbax and tensorstore do not detect it: wrong weights would load silently."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved[0], folder)
    read = functools.partial(load_parameters, folder, model, step=7)
    files = [
        path
        for path in sorted((folder / "7" / "params").rglob("*"))
        if path.is_file() and path.stat().st_size
    ]
    assert files
    for path in files:
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 16])
        path.write_bytes(content[:middle] + flipped + content[middle + 1 :])
        with pytest.raises(UserError, match="cannot read the checkpoint"):
            read()
        path.write_bytes(content)
    assert_equal(read(), saved[1].params)
    (folder / "7" / DIGESTS).write_text("[]")
    with pytest.raises(UserError, match="cannot read the checkpoint"):
        read()
    # Checkpoints of earlier versions have no digests.
    (folder / "7" / DIGESTS).unlink()
    assert_equal(read(), saved[1].params)
    (folder / "7" / "_CHECKPOINT_METADATA").write_text("1" * 5000)
    for command in (read, lambda: Checkpoints(folder)):
        with pytest.raises(UserError, match="cannot read the checkpoint"):
            command()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_best_checkpoint_is_kept_beyond_the_newest(states, tmp_path):
    folder = tmp_path / "a\\b"  # For tensorstore it would be a/b.
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.steps() == []
        for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
            checkpoints.save(step, states[3], {}, best)
        assert checkpoints.steps() == [2, 4, 5] == sorted(whole_steps(folder))
    assert names(folder) == ["2", "4", "5"]
    assert best_step(folder) == 2
    # A resumed run passes the best step again; a new best replaces the old one.
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(6, states[3], {}, 2)
        checkpoints.save(7, states[3], {}, 7)
        checkpoints.save(8, states[3], {}, 7)
    assert names(folder) == ["7", "8"]
    assert best_step(folder) == 7


def test_incomplete_checkpoints_of_a_killed_run_are_ignored(
    saved, states, model, one_device, tmp_path
):
    folder = shutil.copytree(saved[0], tmp_path / "checkpoints")
    # One checkpoint was being written, another one deleted.
    incomplete = folder / "9.orbax-checkpoint-tmp"
    shutil.copytree(folder / "7" / "params", incomplete / "params")
    shutil.rmtree(folder / "3" / "optimizer")
    (folder / "3" / "_CHECKPOINT_METADATA").unlink()
    assert_equal(load_parameters(folder, model), saved[1].params)
    abstract = abstract_state(model, OPTIMIZER, one_device)
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.latest_step == 7
        assert_equal(checkpoints.restore(abstract), saved[1])
        checkpoints.save(8, states[3], {})
        checkpoints.save(9, states[3], {})
    assert names(folder) == ["8", "9"]


@contextlib.contextmanager
def small_files():
    """Makes tensorstore's own writes fail, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# Here too, Orbax leaves a thread behind.
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)
def test_full_disk_keeps_the_last_complete_checkpoint(
    states, model, one_device, tmp_path, caplog
):
    message = "File too large; the newest .* is that of step 1: free space"

    def run():
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, states[3], {"given": 1}, 1)
            checkpoints.wait()
            with small_files():
                checkpoints.save(2, states[7], {"given": 2}, 1)
                checkpoints.wait()

    with pytest.raises(UserError, match=message) as error:
        run()
    assert "\n" not in str(error.value)
    assert not caplog.records  # Nor are there tracebacks beside the sentence.
    abstract = abstract_state(model, OPTIMIZER, one_device)
    with Checkpoints(tmp_path) as checkpoints:
        assert_equal(checkpoints.restore(abstract), states[3])
        assert checkpoints.restore_data()["given"] == 1
    # Threads of the failed save may still be writing.
    assert whole_steps(tmp_path) == [1]
