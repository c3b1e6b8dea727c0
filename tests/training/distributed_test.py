import dataclasses
import functools
import os
import pathlib
import pickle
import re
import signal

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.rows import RowIterator, open_rows
from bpd_jax.models.compute import ComputeConfig
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.training import distributed
from bpd_jax.training.exported_params import load_run_parameters
from bpd_jax.training.metrics import read_rows
from bpd_jax.training.trainer import train
from tests.commands import Script, free_port
from tests.training.runs import parameters

CHILD = pathlib.Path(__file__).with_name("train_process.py")


def train_on_two(config, run, folder, stop=0, number=signal.SIGTERM, victim=1):
    """Runs two processes of four devices; one of them gets a signal.

    Returns their exit statuses, what they printed and the rows that they read.
    """
    folder.mkdir()
    pickled = folder / "config.pickle"
    pickled.write_bytes(pickle.dumps(config))
    paths = [folder / f"{index}.npy" for index in range(2)]
    stops = [stop if index == victim else 0 for index in range(2)]
    address = f"127.0.0.1:{free_port()}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    children = [
        Script(
            CHILD,
            *(str(pickled), str(run), str(path)),
            *(address, "2", str(index), str(stop), str(int(number))),
            folder=folder,
            environment={"XLA_FLAGS": flags},
        )
        for index, (path, stop) in enumerate(zip(paths, stops, strict=True))
    ]
    results = [child.wait(timeout=240) for child in children]
    statuses = [result.returncode for result in results]
    printed = [(result.stdout, result.stderr) for result in results]
    if number == signal.SIGKILL:
        return statuses, printed, [np.load(path) for path in paths if path.exists()]
    # Not compared as a value, which pytest would shorten.
    if not all(path.exists() for path in paths):
        pytest.fail("\n".join(text for both in printed for text in both))
    return statuses, printed, [np.load(path) for path in paths]


def train_alone(config, run):
    """Trains in this process, on its eight devices."""
    train(
        config,
        run,
        load_start=functools.partial(load_run_parameters, config.start, config.model),
    )


def assert_close(left, right, first_step=1):
    """Equal parameters and metrics, up to the rounding of sums in another order."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        parameters(left),
        parameters(right),
    )
    rows = [
        [row for row in read_rows(run / "metrics.jsonl") if row["step"] >= first_step]
        for run in (left, right)
    ]
    assert rows[0]
    for left_row, right_row in zip(*rows, strict=True):
        speed = {"tokens_per_second"}
        assert left_row.keys() - speed == right_row.keys() - speed
        for name in left_row.keys() - speed:
            np.testing.assert_allclose(
                left_row[name], right_row[name], rtol=1e-3, atol=1e-5
            )


@pytest.fixture(scope="module")
def config(train_config, tmp_path_factory):
    """Eight steps, from a trained run, of a model whose every parameter has a gradient.

    The gradient of a key's bias is 0 but for rounding, which AdamW would amplify.
    """
    trunk = dataclasses.replace(train_config.model.trunk, use_bias=False)
    model = dataclasses.replace(train_config.model, trunk=trunk)
    config = dataclasses.replace(train_config, model=model)
    start = tmp_path_factory.mktemp("start")
    train(dataclasses.replace(config, seed=1, steps=1), start)
    return dataclasses.replace(config, start=str(start), steps=8)


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """The run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    train_alone(config, folder)
    return folder


def test_two_processes_equal_one(config, alone, tmp_path):
    """Starts from a trained run; another mesh, rematerialisation, loss chunks."""
    mesh = MeshConfig(data=2, fsdp=2, model=2)
    compute = ComputeConfig(remat="full", loss_chunk=8)
    config = dataclasses.replace(config, mesh=mesh, compute=compute)
    run = tmp_path / "run"
    statuses, printed, rows = train_on_two(config, run, tmp_path / "out")
    assert statuses == [0, 0], printed
    assert_close(run, alone)
    # Each read its own half of every batch.
    batches = RowIterator(open_rows(run / "data" / "train"), 8, config.seed)
    for step, parts in enumerate(zip(*rows, strict=True)):
        assert [len(part) for part in parts] == [4, 4], step
        np.testing.assert_array_equal(np.concatenate(parts), next(batches).tokens)
    # Only process 0 prints.
    assert "tokens on 8 cpu of 2 processes" in printed[0][0]
    # Process 1 prints only lines of Gloo's threads, which may be interleaved.
    for word in ("model:", "data:", "run:", "finished"):
        assert word in printed[0][0]
        assert word not in printed[1][0]
    assert "training" not in printed[1][1]


def test_two_processes_resume_one_and_one_resumes_two(config, alone, tmp_path):
    """One process trains 2 steps, two resume until a signal to one, one ends the run.

    Of the two, only process 0 inspects the folder; the last has another mesh.
    """
    run = tmp_path / "run"
    train_alone(dataclasses.replace(config, steps=2), run)
    statuses, printed, rows = train_on_two(config, run, tmp_path / "out", stop=2)
    assert statuses == [128 + signal.SIGTERM] * 2, printed
    steps = 2 + distributed.LAG
    assert f"is saved at step {2 + steps} of 8" in printed[0][0]
    assert [len(read) for read in rows] == [steps, steps]
    mesh = MeshConfig(data=4, fsdp=2)
    train_alone(dataclasses.replace(config, mesh=mesh), run)
    assert_close(run, alone, first_step=3)


def kill_one(config, run, folder, victim, stop):
    """Kills one of two processes; the other must end with one sentence."""
    statuses, printed, _ = train_on_two(
        config, run, folder, stop, signal.SIGKILL, victim
    )
    assert statuses[victim] == -signal.SIGKILL
    assert statuses[1 - victim] == 1, printed
    errors = printed[1 - victim][1]
    assert f"\nerror: process {victim} of this run has died" in errors
    assert "Traceback" not in errors


@pytest.mark.exhaustive
def test_a_killed_process_ends_the_other_with_one_sentence(config, alone, tmp_path):
    config = dataclasses.replace(config, checkpoint_every=2)
    run = tmp_path / "run"
    kill_one(config, run, tmp_path / "out", victim=1, stop=6)
    train_alone(config, run)
    assert_close(run, alone)


@pytest.fixture(scope="module")
def together(config, tmp_path_factory):
    """The run in two processes, with four checkpoints."""
    config = dataclasses.replace(config, checkpoint_every=2)
    folder = tmp_path_factory.mktemp("together")
    statuses, printed, _ = train_on_two(config, folder / "run", folder / "out")
    assert statuses == [0, 0], printed
    return config, folder / "run"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("victim", "stop"),
    [(1, 6), (0, 6), (0, -2)],
    ids=["step", "step_of_first", "save"],
)
def test_two_processes_resume_exactly_after_a_kill(together, tmp_path, victim, stop):
    config, uninterrupted = together
    run = tmp_path / "run"
    kill_one(config, run, tmp_path / "out", victim, stop)
    statuses, printed, _ = train_on_two(config, run, tmp_path / "again")
    assert statuses == [0, 0], printed
    assert re.search(r"run: steps [2-6] to 8", printed[0][0]), printed[0][0]
    jax.tree.map(
        np.testing.assert_array_equal, parameters(run), parameters(uninterrupted)
    )


def test_all_processes_report_the_same_error(config, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.tex").write_text("years of work — ünïcode")
    statuses, printed, _ = train_on_two(config, run, tmp_path / "out")
    assert statuses == [1, 1], printed
    sentence = (
        f"error: {run} holds thesis.tex, which is not part of a run: choose another "
        "--workdir.\n"
    )
    assert all(errors.endswith(sentence) for _, errors in printed), printed
    assert [path.name for path in run.iterdir()] == ["thesis.tex"]


class Device:
    """The attributes of a device that are used."""

    def __init__(self, process_index):
        self.process_index = process_index


def fake_devices(monkeypatch, mesh, hosts):
    """The mesh as if its devices, in their order, belonged to the given processes."""
    devices = [Device(host) for host in hosts]
    fakes = dict(zip(mesh.devices.flat, devices, strict=True))

    class Sharding(jax.sharding.NamedSharding):
        def devices_indices_map(self, shape):
            indices = super().devices_indices_map(shape)
            return {fakes[device]: index for device, index in indices.items()}

    monkeypatch.setattr(distributed, "NamedSharding", Sharding)


@pytest.mark.parametrize(
    "config, hosts, parts, count",
    [
        (MeshConfig(8, 1, 1), [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3], 4),
        (MeshConfig(4, 1, 2), [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3], 4),
        (MeshConfig(2, 1, 4), [0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1], 2),
        (MeshConfig(1, 1, 8), [0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0], 1),
        # The network's order: a process's rows need not be neighbours.
        (MeshConfig(2, 4, 1), [0, 1, 0, 1, 1, 0, 1, 0], [0, 1], 2),
    ],
)
def test_every_process_reads_the_rows_of_its_devices(
    monkeypatch, config, hosts, parts, count
):
    mesh = make_mesh(config)
    fake_devices(monkeypatch, mesh, hosts)
    for process, part in enumerate(parts):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert distributed.batch_part(mesh) == (part, count)


def test_partially_overlapping_rows_are_refused(monkeypatch):
    mesh = make_mesh(MeshConfig(data=4, model=2))
    # Process 0 holds rows 0 and 1, process 1 rows 1 and 2.
    fake_devices(monkeypatch, mesh, [0, 0, 0, 1, 1, 1, 2, 2])
    with pytest.raises(UserError, match="splits a batch unevenly across processes"):
        distributed.batch_part(mesh)


def test_only_several_processes_initialize_jax_distributed(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **a: calls.append(a))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    distributed.initialize()
    distributed.initialize("localhost:1234", 1, 0)
    for name, value in {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    distributed.initialize()
    assert calls == []
    assert distributed.batch_part(make_mesh(MeshConfig())) == (0, 1)
    # Several SLURM tasks use jax's automatic coordinator.
    monkeypatch.setenv("SLURM_NTASKS", "2")
    distributed.initialize()
    assert [call["coordinator_address"] for call in calls] == [None]


def test_processes_that_have_not_joined_are_refused(monkeypatch):
    distributed.check_joined()
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(UserError, match=r"jax sees 4 processes.*--distributed"):
        distributed.check_joined()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("host:1", 2, None), "--process_id is missing: coordinator_address, "),
        ((None, 2, 1), "--coordinator_address is missing"),
        (("host", 2, 1), "--coordinator_address=host must be HOST:PORT"),
        (("host:1", 0, 0), "--process_id=0 from 0 to one less than --num_processes=0"),
        (("host:1", 2, 2), "--process_id=2 from 0 to one less"),
    ],
)
def test_invalid_flags_are_reported(arguments, message):
    with pytest.raises(UserError, match=message):
        distributed.initialize(*arguments)


def test_missing_coordinator_is_reported():
    address = f"127.0.0.1:{free_port()}"
    message = f"cannot join the other processes at {address}: .*refused; check that all"
    with pytest.raises(UserError, match=message):
        distributed.initialize(address, 2, 1, timeout=0)
