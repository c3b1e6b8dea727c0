"""A run under gs:// from beginning to end: trained, killed, resumed, decoded."""

import pytest

from tests.commands import call
from tests.train_test import MODEL

RUN = "gs://bpd-test/runs/demo"

pytest.importorskip("seqio", reason="rows are made with seqio")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bucket_runs")
    (folder / "run.gin").write_text(MODEL)
    (folder / "texts").mkdir()
    for number in range(12):
        lines = [f"{number} times {k} is {number * k}." for k in range(20)]
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines))
    return folder


def train(folder, workdir, steps):
    return call(
        "bpd_jax.train",
        *("--gin_file=run.gin", "--gin.TEXT_FILES='texts/*.txt'"),
        *(f"--workdir={workdir}", f"--gin.STEPS={steps}"),
        "--gin.TrainConfig.checkpoint_every=3",
        *("--gin.TrainConfig.log_every=1", "--gin.LR_SCHEDULE='constant'"),
        folder=folder,
    )


@pytest.fixture(scope="module")
def run(folder, storage):
    """A run of 9 steps, stopped at step 6, and killed while it saves step 9."""
    storage.objects["bpd-test"].clear()
    result = train(folder, RUN, 6)
    assert result.returncode == 0, result.stderr
    return folder


def test_a(run, storage):
    print(sorted(storage.objects["bpd-test"]))
