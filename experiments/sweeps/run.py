"""Runs a sweep, a grid of trainings or studies, and prints its table of results.

    python -m experiments.sweeps.run --sweep=heads --size=tiny
    python -m experiments.sweeps.run --sweep=finetune --dry_run \\
        -- --gin.START="'runs/blockwise_1b5'"
    python -m experiments.sweeps.run --sweep=heads --launcher=tpu --requested=2 \\
        --name=sweep --zone=us-east5-b --topology=v6e:16x16 \\
        --output=gs://BUCKET/sweeps -- --gin_file=gin_configs/meshes/v6e_256.gin
    python -m experiments.sweeps.run --sweep=studies -- --data=FOLDER

Arguments after -- are added to every point, each of which has a folder in --output. The
same command resumes; trainings that have ended are skipped.
"""

import shlex
import sys
from typing import Any

from absl import flags

from bpd_jax.base import cli, configuration
from bpd_jax.base.errors import UserError
from bpd_jax.reporting.terminal import print_rows
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path, local_copy
from bpd_jax.training import metrics, run_folder
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.validation import Selection
from experiments.launch import slurm, tpu
from experiments.launch.command import TRAIN, Command, Program, parse_program, run
from experiments.launch.dry_run import DRY_RUN
from experiments.sweeps.catalog import PAPER, find_sweep

SWEEP = flags.DEFINE_string(
    "sweep", None, "Name of the sweep; an unknown name lists all of them."
)
SIZE = flags.DEFINE_string("size", PAPER, "paper, or tiny for a laptop.")
POINT = flags.DEFINE_multi_string("point", [], "Only these points; default: all.")
OUTPUT = cli.DEFINE_path("output", "runs/sweeps", "Parent folder of the sweeps.")
LAUNCHER = flags.DEFINE_enum(
    "launcher", "local", ["local", "slurm", "tpu"], "Where the points run."
)
REQUESTED = flags.DEFINE_integer(
    "requested", 1, "Requests for TPU slices; each runs one point at a time."
)
TABLE = flags.DEFINE_bool("table", False, "Only print the table of results so far.")

# Exit statuses of a run that was interrupted by Ctrl-C or SIGTERM.
_STOPPED = (130, 143)


def main(more: list[str]) -> None:
    """Runs the points that have not ended, or prints the table."""
    sweep = find_sweep(cli.required("sweep"))
    if flags.FLAGS.stop:
        tpu.stop(tpu.requested(REQUESTED.value))
        return
    points = sweep.points(SIZE.value)
    for name in POINT.value:
        if name not in points:
            raise UserError(f"there is no point {name} among {'; '.join(points)}.")
    names = [name for name in points if name in (POINT.value or points)]
    folder = f"{OUTPUT.value.rstrip('/')}/{SWEEP.value}_{SIZE.value}"
    if TABLE.value:
        _print_table(folder, names, sweep.columns)
        return
    programs = {
        name: parse_program([*points[name], *more, f"--workdir={folder}/{name}"])
        for name in names
    }
    left = {name: x for name, x in programs.items() if not _has_ended(x)}
    if not left:
        print("all points have ended.")
    elif LAUNCHER.value == "slurm":
        slurm.submit([*left.values()])
    elif LAUNCHER.value == "tpu":
        tpu.launch(left, tpu.requested(REQUESTED.value))
    elif DRY_RUN.value:
        for program in left.values():
            print(shlex.join(program.words("python")))
    else:
        _run(left)
    if DRY_RUN.value:
        print(f"# {len(names) - len(left)} of {len(names)} points have ended")
    elif LAUNCHER.value != "slurm":
        _print_table(folder, names, sweep.columns)


def _run(programs: dict[str, Program]) -> None:
    """Runs points one after another on this machine."""
    failed = []
    for name, program in programs.items():
        status = run(Command(name, program.words(sys.executable)))
        if status in _STOPPED:
            sys.exit(status)
        if status:
            failed.append(name)
    if failed:
        raise UserError(f"{', '.join(failed)} failed; the same command resumes.")


def _has_ended(program: Program) -> bool:
    """Whether a training has reached its last step, or has ended early."""
    if program.module != TRAIN:
        return False
    given = program.values("gin_file"), program.values("gin_bindings")
    config = configuration.parse(*given, TrainConfig).value
    try:
        rows, selection = _evaluations(program.values("workdir")[-1], config.select_by)
    except UserError as error:
        if not DRY_RUN.value:
            raise
        print(f"# {error}")
        return False
    ended = bool(rows) and rows[-1]["step"] >= config.steps
    return ended or selection.is_over(config.patience)


def _evaluations(folder: str, name: str) -> tuple[list[dict[str, Any]], Selection]:
    """The evaluations of a run so far, and the best of them by a metric."""
    logged = metrics.read_rows(as_path(folder) / metrics.FILE_NAME)
    rows, selection = [row for row in logged if name in row], Selection(name)
    for row in rows:
        selection = selection.after(row["step"], row)
    return rows, selection


def _print_table(folder: str, names: list[str], columns: tuple[str, ...]) -> None:
    """Prints the results that are there, and writes them to `results.json`."""
    results = {name: _results(f"{folder}/{name}") for name in names}
    shown = ["step", *columns, "block efficiency", "by", "records"]
    shown = [x for x in shown if any(x in found for found in results.values())]
    headings = [column.removeprefix("validation_") for column in shown]
    rows = []
    for name, found in results.items():
        cells = [found.get(column, "–") for column in shown]
        text = [f"{x:.4f}" if isinstance(x, float) else str(x) for x in cells]
        rows.append([name, *text])
    print_rows(["", *headings], rows, title=folder)
    if any(results.values()):
        path = as_path(folder) / "results.json"
        files.write_json(path, results)
        print(f"all figures: {path}")
    if "records" in shown:
        print(f"report: python -m bpd_jax.report {folder}")


def _results(folder: str) -> dict[str, Any]:
    """What a point has: its best evaluation, block efficiency, records of a study."""
    path = as_path(folder)
    found: dict[str, Any] = {}
    name, saved = "validation_loss", path / run_folder.CONFIG
    if saved.exists():
        name = configuration.parse([local_copy(saved)], [], TrainConfig).value.select_by
    rows, selection = _evaluations(folder, name)
    best = next((row for row in rows if row["step"] == selection.step), {})
    found |= metrics.finite(best)
    report = path / "evaluation" / "report.json"
    if report.exists():
        try:
            methods = files.read_json(report)["methods"]
            kept = [x for x in methods if not x["upper_bound"]]
            best = max(kept, key=lambda x: x["block_efficiency"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{report} is damaged: evaluate {folder} again.") from error
        found |= {"block efficiency": best["block_efficiency"], "by": best["label"]}
    records = [*path.glob("*/records.jsonl")] if path.exists() else []
    if records and not found:
        found["records"] = sum(x.read_text().count("\n") for x in records)
    return found


if __name__ == "__main__":
    cli.run(main, positional=True)
