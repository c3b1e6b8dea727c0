"""The kill benchmark at small scale."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def kill(folder, count, steps, processes=1):
    """The report of the benchmark after `count` kills."""
    output = folder / "kill.json"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.kill", f"--output={output}"),
            *(f"--kills={count}", f"--steps={steps}", f"--processes={processes}"),
        ],
        cwd=ROOT,
        # The devices of one process; eight would only be slower.
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(output.read_text())


def check(report, count):
    assert len(report["kills"]) == count
    assert report["torn_saves"] >= 1
    # Each kill falls into its own part of the run, except those at a start.
    steps = [kill["step"] for kill in report["kills"] if kill["moment"] != "start"]
    assert steps == sorted(steps)
    assert report["compared"] == {"parameters and optimizer": True, "metrics": True}


@pytest.mark.exhaustive
# With two processes on two cores, 2,000 steps can exceed the patience of the benchmark.
@pytest.mark.parametrize("processes, steps", [(1, 2000), (2, 600)])
def test_run_killed_twenty_times_equals_an_uninterrupted_one(
    tmp_path, processes, steps
):
    """With accumulation, a head schedule and stacked layers (benchmarks/kill.gin)."""
    report = kill(tmp_path, 20, steps, processes)
    check(report, 20)
    assert {kill["process"] for kill in report["kills"]} == set(range(processes))
