"""A run under gs:// from beginning to end: killed, resumed, decoded, evaluated."""

import multiprocessing

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.config_files import load_config
from bpd_jax.storage.paths import as_path
from bpd_jax.training.checkpoint_files import _check_digests
from bpd_jax.training.checkpoints import best_step, load_parameters
from bpd_jax.training.run_names import whole_steps
from tests.commands import call
from tests.train_test import write_run
from tests.training.runs import logged

PREFIX = "runs/demo"
RUN = f"gs://bpd-test/{PREFIX}"
CHECKPOINTS = f"{PREFIX}/checkpoints"


def train(folder, workdir):
    return call(
        "bpd_jax.train",
        *("--gin_file=run.gin", f"--workdir={workdir}"),
        *("--gin.TEXT_FILES='texts/*.txt'", "--gin.STEPS=9"),
        *("--gin.TrainConfig.checkpoint_every=3", "--gin.TrainConfig.log_every=1"),
        folder=folder,
    )


def kill_at(storage, name):
    """Kills the training process when it begins to upload an object."""

    def kill(uploaded):
        if uploaded == name:
            [training] = multiprocessing.active_children()
            training.kill()
            raise ConnectionAbortedError

    storage.before_upload = kill


@pytest.fixture(scope="module")
def run(storage, tmp_path_factory):
    """A run killed while it saves step 6 and resumed, and one that never was."""
    folder = tmp_path_factory.mktemp("bucket_runs")
    write_run(folder)
    storage.clear()
    kill_at(storage, f"{CHECKPOINTS}/6/commit_success.txt")
    with pytest.raises(AssertionError, match="-9"):
        train(folder, RUN)
    storage.before_upload = lambda name: None
    assert whole_steps(as_path(RUN) / "checkpoints") == [3]
    for workdir in (RUN, "local"):
        assert train(folder, workdir).returncode == 0
    return folder


def test_a_killed_run_resumes_bit_exactly(run, storage):
    config = load_config(run / "local" / "model.json")
    parameters = [
        load_parameters(as_path(workdir) / "checkpoints", config, step=9)
        for workdir in (RUN, run / "local")
    ]
    jax.tree.map(np.testing.assert_array_equal, *parameters)
    assert logged(RUN) == logged(run / "local")
    names = storage.objects["bpd-test"]
    assert not [name for name in names if name.endswith(".part")]


def test_damaged_checkpoints_are_reported(run, storage):
    objects = storage.objects["bpd-test"]
    config = load_config(as_path(RUN) / "model.json")
    checkpoints = f"{RUN}/checkpoints"
    assert best_step(checkpoints) in (3, 6, 9)
    of_params = [name for name in objects if name.startswith(f"{CHECKPOINTS}/9/params")]
    largest = max(of_params, key=lambda name: len(objects[name].data))
    for name, read in (
        (largest, lambda: load_parameters(checkpoints, config, step=9)),
        (f"{CHECKPOINTS}/9/data/metadata", lambda: best_step(checkpoints)),
    ):
        intact = objects[name]
        flipped = bytearray(intact.data)
        flipped[len(flipped) // 2] ^= 1
        storage.put("bpd-test", name, bytes(flipped))
        with pytest.raises(UserError, match="cannot read the checkpoint"):
            read()
        del objects[name]
        with pytest.raises(UserError, match="cannot read the checkpoint"):
            read()
        objects[name] = intact
        read()


def test_digests_are_compared_without_a_download(run, storage):
    name = f"{CHECKPOINTS}/9/optimizer/_sharding"
    intact = storage.objects["bpd-test"][name]
    storage.put("bpd-test", name, intact.data + b" ")
    storage.requests.clear()
    with pytest.raises(UserError, match="has changed since it was saved"):
        _check_digests(as_path(f"{RUN}/checkpoints/9/optimizer"))
    storage.objects["bpd-test"][name] = intact
    _check_digests(as_path(f"{RUN}/checkpoints/9/optimizer"))
    assert set(storage.downloads()) <= {f"{CHECKPOINTS}/9/digests.json"}
