"""The command `bpd_jax.train_refiner`."""

import shutil

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.attachment_files import check_fits, load_refiner
from bpd_jax.training.refiner_sources import default_data
from tests import commands


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    """A folder with `run`, the run folder of a small model."""
    folder = tmp_path_factory.mktemp("refiner")
    shutil.copytree(trained / "run", folder / "run")
    return folder


def test_trains_into_the_run_folder(folder):
    status, stdout, stderr = commands.call(
        "bpd_jax.train_refiner",
        *("--model=run", "--kind=recurrent", "--steps=2", "--rank=8"),
        folder=folder,
    )
    assert status == 0, stderr
    assert "model: plain" in stdout
    assert "the refiner is in run/refiners/recurrent" in stdout
    assert "loss" in stderr
    assert "Traceback" not in stderr
    loaded = load_refiner(folder / "run" / "refiners" / "recurrent")
    check_fits(loaded.config, vocab_size=270, d_model=16, block_size=4)
    assert (loaded.kind, loaded.config.rank) == ("recurrent", 8)
    assert loaded.facts["command"].endswith("--steps=2 --rank=8")
    assert len(loaded.facts["held_out"]["refined_text_accuracy"]) == 3
    # The run can still be resumed.
    assert (folder / "run" / "model.json").exists()


def test_the_default_data_are_rows_or_else_states(tmp_path):
    with pytest.raises(UserError, match=r"neither packed rows in .*data nor cached"):
        default_data(tmp_path)
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "states.json").write_text("{}")
    assert default_data(tmp_path) == tmp_path / "states"
    (tmp_path / "data").mkdir()
    assert default_data(tmp_path) == tmp_path / "data"


def test_invalid_input_is_refused_without_output(folder):
    before = sorted(folder.rglob("*"))
    cases = [
        (["--model=run"], "--kind is missing"),
        (
            ["--model=run", "--kind=eagle"],
            "one of markov, recurrent, hydra, not 'eagle'",
        ),
        (["--model=run", "--kind=hydra", "--output=run"], "run is not written to"),
        (["--model=run", "--kind=hydra", "--heads=x"], "--heads is for pretrained"),
    ]
    commands.assert_all_refused("bpd_jax.train_refiner", cases, folder)
    assert sorted(folder.rglob("*")) == before
