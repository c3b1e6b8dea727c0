"""The kill benchmark at small scale."""

import json

import pytest

from tests.commands import python


@pytest.mark.exhaustive
# With two processes on two cores, 2,000 steps can exceed the patience of the benchmark.
@pytest.mark.parametrize("processes, steps", [(1, 2000), (2, 600)])
def test_run_killed_twenty_times_equals_an_uninterrupted_one(
    tmp_path, processes, steps
):
    """With accumulation and stacked layers (benchmarks/kill.gin)."""
    output = tmp_path / "kill.json"
    flags = "--kills=20", f"--steps={steps}", f"--processes={processes}"
    program = "-m", "benchmarks.kill", f"--output={output}", *flags
    # The devices of one process; eight would only be slower.
    result = python(*program, XLA_FLAGS="")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(output.read_text())
    assert len(report["kills"]) == 20
    assert report["torn_saves"] >= 1
    # Each kill falls into its own part of the run, except those at a start.
    steps = [kill["step"] for kill in report["kills"] if kill["moment"] != "start"]
    assert steps == sorted(steps)
    assert report["compared"] == {"parameters and optimizer": True, "metrics": True}
    assert {kill["process"] for kill in report["kills"]} == set(range(processes))
