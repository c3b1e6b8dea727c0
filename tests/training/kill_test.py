"""The benchmark of kills, in small: one between two saves, one in the middle of one."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("seqio") is None, reason="rows are made with seqio"
)


def kill(folder, count, steps, processes=1):
    """What the benchmark writes after so many kills."""
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


def check(found, count):
    assert len(found["kills"]) == count
    assert found["torn_saves"] >= 1
    # Each kill falls into its own part of the run, but for those at a start.
    steps = [kill["step"] for kill in found["kills"] if kill["moment"] != "start"]
    assert steps == sorted(steps)
    assert found["compared"] == {"parameters and optimizer": True, "metrics": True}


@pytest.mark.exhaustive
def test_killed_twice_it_ends_as_if_never(tmp_path):
    found = kill(tmp_path, 2, 400)
    check(found, 2)
    assert sorted(kill["moment"] for kill in found["kills"]) == ["save", "step"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_twenty_times_it_ends_as_if_never(tmp_path, processes):
    """With accumulation, a head schedule and stacked layers (benchmarks/kill.gin)."""
    found = kill(tmp_path, 20, 2000, processes)
    check(found, 20)
    assert {kill["process"] for kill in found["kills"]} == set(range(processes))
