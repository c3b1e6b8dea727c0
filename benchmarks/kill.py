"""Kills a tiny run repeatedly at random times, and compares its final state.

    python -m benchmarks.kill
    python -m benchmarks.kill --kills=100 --seed=1 --processes=2

One run trains without interruption. Another of the same configuration is killed
(SIGKILL) during start-up, between saves and during saves, spread over the whole run,
and restarted each time. With several processes one of them is killed, and the others
must exit by themselves; during start-up, when they may not be connected yet, all are
killed. At the end, parameters, optimizer state and metrics of both must be equal
bitwise. Writes one JSON file.
"""

import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks import records
from bpd_jax.base import cli, configuration
from bpd_jax.base.errors import UserError
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.metrics import FILE_NAME, read_rows
from bpd_jax.training.state import abstract_state, make_optimizer

KILLS = flags.DEFINE_integer("kills", 20, "number of kills.", 1)
SEED = flags.DEFINE_integer("seed", 0, "of the moments.")
STEPS = flags.DEFINE_integer("steps", 2000, "of the run.", 4 * 50)
PROCESSES = flags.DEFINE_integer("processes", 1, "of the run.", 1)
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/kill_cpu.json", "file.")

# Repeated in this order up to the number of kills, then shuffled.
MOMENTS = ("save", "step", "save", "step", "start")

PATIENCE = flags.DEFINE_float("patience", 300.0, "timeout of each wait, in seconds.")
# Steps between the last kill and the end, which leave time for a save.
REST = 100

CONFIGURATION = "benchmarks/kill.gin"


def main() -> None:
    """Trains both runs, compares them, and writes the results."""
    with tempfile.TemporaryDirectory() as scratch:
        result = _measure(pathlib.Path(scratch))
    records.write(OUTPUT.value, result)
    print(f"written to {OUTPUT.value}")
    if not result["equal"]:
        raise UserError("the killed run differs from the uninterrupted one at the end.")


def _measure(scratch: pathlib.Path) -> dict[str, Any]:
    gin_file = _write_inputs(scratch)
    whole, killed = scratch / "whole", scratch / "killed"
    began = time.monotonic()
    _finish(_launch(gin_file, whole))
    seconds = time.monotonic() - began
    print(f"never killed: {STEPS.value} steps and their saves in {seconds:.1f} s")
    kills = _kill_again_and_again(gin_file, killed)
    _finish(_launch(gin_file, killed))
    torn = sum(kill["torn"] for kill in kills)
    equalities = {
        "parameters and optimizer": _same_state(gin_file, whole, killed),
        "metrics": _rows(whole) == _rows(killed),
    }
    print(f"{len(kills)} kills, {torn} of them during a save; equal: {equalities}")
    return {
        **records.about("kill"),
        "steps": STEPS.value,
        "processes": PROCESSES.value,
        "seed": SEED.value,
        "torn_saves": torn,
        "equal": all(equalities.values()),
        "compared": equalities,
        "kills": kills,
    }


def _write_inputs(scratch: pathlib.Path) -> pathlib.Path:
    """Writes a small corpus, and parses the configuration of a run on it."""
    (scratch / "texts").mkdir()
    for number in range(12):
        lines = [f"{number} times {k} is {number * k}." for k in range(20)]
        (scratch / "texts" / f"{number}.txt").write_text("\n".join(lines))
    gin_file = scratch / "run.gin"
    texts = scratch / "texts" / "*.txt"
    gin_file.write_text(
        f"include '{CONFIGURATION}'\nSTEPS = {STEPS.value}\nTEXT_FILES = '{texts}'\n"
        f"TrainConfig.mesh = @MeshConfig()\nMeshConfig.data = {PROCESSES.value}\n"
    )
    return gin_file


def _launch(gin_file: pathlib.Path, workdir: pathlib.Path) -> list[subprocess.Popen]:
    command = [sys.executable, "-m", "bpd_jax.train"]
    command += [f"--gin_file={gin_file}", f"--workdir={workdir}"]
    several = [[]]
    if PROCESSES.value > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        join = [
            f"--coordinator_address={address}",
            f"--num_processes={PROCESSES.value}",
        ]
        several = [[*join, f"--process_id={i}"] for i in range(PROCESSES.value)]
    return [
        subprocess.Popen(
            [*command, *flags],
            cwd=pathlib.Path(__file__).resolve().parent.parent,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                # Later starts read the compiled programs from the cache.
                "JAX_COMPILATION_CACHE_DIR": str(gin_file.parent / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for flags in several
    ]


def _finish(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        output, _ = process.communicate(timeout=PATIENCE.value)
        if process.returncode:
            raise UserError(
                f"the run ended with {process.returncode}: {output[-2000:]}"
            )


def _kill(processes: list[subprocess.Popen], moment: str, victim: int) -> float | None:
    """Kills one process, or all during start-up; the others must exit with an error.

    Returns:
      Seconds until the others had exited; None if there were none.
    """
    began = time.monotonic()
    for index, process in enumerate(processes):
        if index == victim or moment == "start":
            process.kill()
    for process in processes:
        process.communicate(timeout=PATIENCE.value)
        if process.returncode == 0:
            raise UserError("the run ended before it was killed: give more --steps.")
    if moment == "start" or len(processes) == 1:
        return None
    return round(time.monotonic() - began, 2)


def _kill_again_and_again(
    gin_file: pathlib.Path, workdir: pathlib.Path
) -> list[dict[str, Any]]:
    """Kills a run `KILLS` times; prints each kill.

    The run is divided into as many parts, and kill i happens in part i, after a step
    that is drawn beforehand. (A kill during start-up draws none.)

    Returns:
      For each kill: the phase, `start`, `step` or `save`; the index of the process; the
      seconds since its start; the step of the last row of metrics; the newest complete
      checkpoint, or None; whether the kill left a new incomplete checkpoint; and the
      seconds after which the other processes had exited, or None if there were none.
    """
    chance = random.Random(SEED.value)
    moments = [MOMENTS[i % len(MOMENTS)] for i in range(KILLS.value)]
    chance.shuffle(moments)
    part = (STEPS.value - REST) / KILLS.value
    kills: list[dict[str, Any]] = []
    for index, moment in enumerate(moments):
        aim = int((index + chance.random()) * part)
        reached = _reaching(workdir, aim)
        left = _half_written(workdir)
        processes = _launch(gin_file, workdir)
        first, victim = processes[0], chance.randrange(len(processes))
        began = time.monotonic()
        if moment == "start":
            _wait(first, chance.uniform(0, 4), lambda: False)
        else:
            _wait(first, PATIENCE.value, reached)
        if moment == "save":
            _wait(first, PATIENCE.value, _saving(workdir))
        after = time.monotonic() - began
        ended = _kill(processes, moment, victim)
        step, checkpoint = _state_of(workdir)
        kills.append(
            {
                "moment": moment,
                "process": victim,
                "seconds": round(after, 2),
                "step": step,
                "checkpoint": checkpoint,
                "torn": bool(_half_written(workdir) - left),
                "others_ended": ended,
            }
        )
        print(len(kills), kills[-1], flush=True)
    return kills


def _wait(process: subprocess.Popen, seconds: float, until: Callable[[], bool]) -> None:
    """Waits until a condition holds, the process ends, or the time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None and not until():
        time.sleep(0.0005)


def _half_written(workdir: pathlib.Path) -> set[tuple[str, int]]:
    """Incomplete checkpoints, by name and inode.

    The name alone does not distinguish a leftover from the next save of the same step.
    """
    half_written = set()
    for name in _listed(workdir):
        if "orbax-checkpoint-tmp" in name:
            with contextlib.suppress(FileNotFoundError):
                half_written.add((name, (workdir / "checkpoints" / name).stat().st_ino))
    return half_written


def _listed(workdir: pathlib.Path) -> list[str]:
    try:
        return os.listdir(workdir / "checkpoints")
    except FileNotFoundError:
        return []


def _last_step(workdir: pathlib.Path) -> int:
    """The step of the last complete row of metrics."""
    try:
        text = (workdir / FILE_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    last = text[: text.rfind("\n") + 1].splitlines()[-1:]
    return json.loads(last[0])["step"] if last else 0


def _reaching(workdir: pathlib.Path, aim: int) -> Callable[[], bool]:
    """A condition: the next process has done a step, and the run as many as `aim`.

    A process rewrites the metrics when it starts.
    """
    path = workdir / FILE_NAME
    before = path.stat().st_ino if path.exists() else None
    start = _state_of(workdir)[1] or 0

    def reached() -> bool:
        new = path.exists() and path.stat().st_ino != before
        return new and _last_step(workdir) >= max(aim, start + 1)

    return reached


def _saving(workdir: pathlib.Path) -> Callable[[], bool]:
    """A condition: the next save has begun."""
    before = _half_written(workdir)
    return lambda: bool(_half_written(workdir) - before)


def _state_of(workdir: pathlib.Path) -> tuple[int, int | None]:
    """Steps of the last row of metrics and of the newest complete checkpoint."""
    steps = [int(name) for name in _listed(workdir) if name.isdigit()]
    return _last_step(workdir), max(steps, default=None)


def _same_state(gin_file: pathlib.Path, *workdirs: pathlib.Path) -> bool:
    config = configuration.parse([gin_file], [], TrainConfig).value
    optimizer = make_optimizer(config.optimizer, config.steps)
    # Of one process, on whose device the states are compared.
    mesh = make_mesh(MeshConfig())
    abstract = abstract_state(config.model, optimizer, mesh, config.compute)
    states = []
    for workdir in workdirs:
        with Checkpoints(workdir / "checkpoints", config.keep_checkpoints) as saved:
            if saved.latest_step != config.steps:
                return False
            states.append(jax.device_get(saved.restore(abstract)))
    pairs = zip(*map(jax.tree.leaves, states), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The metrics, except the speed."""
    rows = read_rows(workdir / FILE_NAME)
    return [
        {name: value for name, value in row.items() if name != "tokens_per_second"}
        for row in rows
    ]


if __name__ == "__main__":
    cli.run(main)
