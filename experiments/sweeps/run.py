"""Runs the points of a sweep, and prints a table of their results.

    python -m experiments.sweeps.run --sweep=heads --size=tiny
    python -m experiments.sweeps.run --sweep=finetune \\
        --gin.START="'runs/blockwise_1b5'" \\
        --gin_file=gin_configs/meshes/finetune_8.gin --dry_run
    python -m experiments.sweeps.run --sweep=decay --launcher=slurm --gpus=8 \\
        --gin_file=gin_configs/meshes/gpu_8.gin

    python -m experiments.sweeps.run --sweep=heads --launcher=tpu --requested=2 \\
        --name=sweep --zone=us-east5-b --topology=v6e:16x16 --spot \\
        --share=10.0.0.2:/runs --gin_file=gin_configs/meshes/v6e_256.gin

--dry_run validates the configurations and prints one command for each point. Finished
points are skipped and others resume where they stopped, so the same command resumes a
sweep. `--launcher=slurm` submits the remaining points as a job array; the same command
with `--table` collects its results. `--launcher=tpu` trains the points on --requested
TPU slices, in the folder --output of the share, and copies the results to --output
here; with --output=gs://BUCKET/FOLDER no share is needed. The same command with --stop
saves and ends the runs. Further gin files and settings apply to all points, and are
applied last.
"""

import pathlib
import shlex
import sys
import time
from functools import partial
from typing import Any

from absl import flags

from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError
from bpd_jax.storage import buckets, files
from bpd_jax.training import metrics
from experiments.launch import slurm_flags, tpu_flags
from experiments.launch.checks import ROOT, check_run, check_travels
from experiments.launch.commands import Command, run, train_words
from experiments.launch.slurm_script import batch_script
from experiments.launch.tpu_slice import TpuSlice
from experiments.launch.tpu_state import ask, read_status
from experiments.sweeps.catalog import PAPER, Arguments, find_points, find_sweep
from experiments.sweeps.on_tpu import Fleet, fetch
from experiments.sweeps.points import Point, make_point

SWEEP = flags.DEFINE_string(
    "sweep", None, "Name of the sweep; an unknown name lists all of them."
)
SIZE = flags.DEFINE_string("size", PAPER, "paper, or tiny for a laptop.")
POINT = flags.DEFINE_multi_string("point", [], "Only these points; default: all.")
OUTPUT = flags.DEFINE_string("output", "runs/sweeps", "Parent folder of the sweeps.")
LAUNCHER = flags.DEFINE_enum(
    "launcher",
    "local",
    ["local", "slurm", "tpu"],
    "local: one after another; slurm: a job array; tpu: on TPU slices.",
)
REQUESTED = flags.DEFINE_integer(
    "requested",
    1,
    "Number of requests for TPU slices; each trains one point at a time.",
    lower_bound=1,
)
TABLE = flags.DEFINE_bool("table", False, "Only print the table of results so far.")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Check everything, print, run nothing.")

# Exit statuses of a run that was interrupted by Ctrl-C or SIGTERM.
_STOPPED = (130, 143)


def main() -> None:
    """Validates all points, then trains those that are not finished."""
    sweep = find_sweep(cli.required("sweep"))
    for flag in (tpu_flags.STOP, tpu_flags.DELETE):
        if flag.value and LAUNCHER.value != "tpu":
            raise UserError(f"--{flag.name} needs --launcher=tpu.")
    if tpu_flags.STOP.value:
        tpu_flags.stop(_tpus(), dry_run=DRY_RUN.value)
        return
    folder = buckets.as_path(OUTPUT.value) / f"{SWEEP.value}_{SIZE.value}"
    points = [
        make_point(
            name,
            arguments,
            folder / name,
            flags.FLAGS.gin_file,
            flags.FLAGS.gin_bindings,
        )
        for name, arguments in _chosen().items()
    ]
    left = [point for point in points if not point.is_finished()]
    if LAUNCHER.value == "slurm" and not TABLE.value:
        _submit(left)
        return
    if LAUNCHER.value == "tpu" and not TABLE.value:
        failed = _train_on_tpus(points, folder)
        if not DRY_RUN.value:
            _finish(folder, points, sweep.columns, failed)
        return
    if DRY_RUN.value:
        for point in left:
            print(shlex.join(_words(point, "python")))
        print(f"# {len(points) - len(left)} of {len(points)} points are finished")
        return
    failed = [] if TABLE.value else _run(left)
    _finish(folder, points, sweep.columns, failed)


def _finish(
    folder: pathlib.Path,
    points: list[Point],
    columns: tuple[str, ...],
    failed: list[str],
) -> None:
    """Prints the table; raises UserError if points ended with an error."""
    _report(folder, points, columns)
    if failed:
        raise UserError(
            f"{', '.join(failed)} did not train to the end: see the output above; the "
            "same command resumes."
        )


def _chosen() -> dict[str, Arguments]:
    """The points that the flags select, in the order of the sweep."""
    points = find_points(SWEEP.value, SIZE.value)
    for name in POINT.value:
        if name not in points:
            raise UserError(
                f"the sweep has no point {name}; there are {'; '.join(points)}."
            )
    return {name: points[name] for name in points if name in (POINT.value or points)}


def _words(point: Point, python: str, folder: str | None = None) -> tuple[str, ...]:
    """The command that trains a point; `folder` is its folder as a worker sees it."""
    folder = folder or str(point.folder)
    return train_words(python, point.gin_files, point.bindings, folder)


def _run(points: list[Point]) -> list[str]:
    """Trains points one after another; returns the names of failed ones."""
    failed = []
    for point in points:
        status = run(Command(point.name, _words(point, sys.executable)))
        if status in _STOPPED:
            sys.exit(status)
        if status:
            failed.append(point.name)
    return failed


def _submit(points: list[Point]) -> None:
    if not points:
        print("all points are finished; --table prints their results.")
        return
    job = slurm_flags.job()
    for point in points:
        check_run(point.gin_files, point.bindings, job.devices)
    commands = [_words(point, slurm_flags.PYTHON.value) for point in points]
    script = batch_script(job, str(ROOT), commands)
    slurm_flags.submit(script, dry_run=DRY_RUN.value)


def _train_on_tpus(points: list[Point], folder: pathlib.Path) -> list[str]:
    """Trains unfinished points on TPU slices; returns the names of failed ones."""
    tpus = _tpus()
    output = tpus[0].folder("output", OUTPUT.value)
    in_bucket = isinstance(folder, buckets.BucketPath)
    for point in points:
        check_run(point.gin_files, point.bindings, tpus[0].devices, tpus[0].slices)
        tpu_flags.check_start(point.parsed.value.start)
    bundle, pack = tpu_flags.source_bundle()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    words = {
        point.name: (
            *_words(point, ".venv/bin/python", f"{output}/{folder.name}/{point.name}"),
            "--distributed",
        )
        for point in points
    }
    if DRY_RUN.value:
        left = [point for point in points if not point.is_finished()]
        shown = [pack, *(tpu.create() for tpu in tpus), *tpus[0].prepare(bundle)]
        shown += [
            tpus[0].start(words[point.name], f"{stamp}-{number}-1", stamp)
            for number, point in enumerate(left)
        ]
        if not in_bucket:
            shown.append(tpus[0].fetch(str(folder)))
        print(*shown, sep="\n\n")
        print(f"# {len(points) - len(left)} of {len(points)} points are finished")
        return []
    for point in points:
        check_travels(point.parsed.files)
    if run(pack):
        raise UserError(f"could not {pack.about}: see git's output above.")
    patience = tpu_flags.patience()
    fleet = Fleet(
        tpus,
        {tpu.name: tpu.prepare(bundle) for tpu in tpus},
        run,
        read_status,
        (lambda _: None) if in_bucket else partial(fetch, folder=folder, asker=ask),
        patience,
        tpu_flags.DELETE.value,
    )
    try:
        fleet.wait_for_earlier_runs()
        left = [point.name for point in points if not point.is_finished()]
        return fleet.train({name: words[name] for name in left}, stamp)
    except KeyboardInterrupt:
        progress.say(
            "# runs that have started continue on the slices: the same command follows "
            "them, --stop ends them"
        )
        raise


def _tpus() -> list[TpuSlice]:
    """The requests for slices that the flags describe."""
    several = range(REQUESTED.value) if REQUESTED.value > 1 else ()
    suffixes = [f"-{number}" for number in several] or [""]
    return [tpu_flags.tpu_slice(suffix) for suffix in suffixes]


def _report(
    folder: pathlib.Path, points: list[Point], columns: tuple[str, ...]
) -> None:
    """Prints the table and writes all figures to `results.json`."""
    results: dict[str, dict[str, Any]] = {}
    width = max(len(point.name) for point in points)
    short = [column.removeprefix("validation_") for column in columns]
    print(" ".join([" " * width, "    step", *(f"{name:>16}" for name in short)]))
    for point in points:
        best = point.best()
        if best is None:
            # All evaluations so far may be NaN.
            name = point.parsed.value.select_by
            text = f"{name} is not finite" if point.rows else "not measured yet"
            print(f"{point.name:<{width}}  {text}")
            continue
        measured = metrics.finite(best)
        results[point.name] = {"finished": point.is_finished(), "best": measured}
        values = [f"{best[c]:16.4f}" if c in best else " " * 16 for c in columns]
        print(" ".join([f"{point.name:<{width}}", f"{best['step']:8,}", *values]))
    files.write_json(folder / "results.json", results)
    print(f"all figures: {folder / 'results.json'}")


if __name__ == "__main__":
    cli.run(main)
