"""The check of an accelerator: what must be known first, in one command.

    python -m benchmarks.accelerator --platform=gpu

`make gpu-check` and `make tpu-check` call it, and `run.sh` of the bundle that `make
gpu-bundle` writes. It needs neither a network nor TensorFlow, seqio or pynini, and
takes gin-config and gguf from wheels in the folder `wheels` if they are not installed.
Parts, in the order in which they run:

    attention   attention kernels against a float32 reference: errors and time
    lossless    a tiny model, all methods: their tokens are those of plain decoding
    plain       plain decoding against the time of reading the weights once
    costs       random weights at 1.5B and 7B: passes, drafting, refinement, and the
                speed-ups that follow from tokens per call on record
    smollm2     SmolLM2 with the shipped drafters, at batch sizes 1, 8 and 32
    training    a training step of the paper's 1.5B model: tokens per second, MFU
    joint       joint training of a 124M blockwise model on the rows in `corpus`, for
                the time that is left

A part is a list of jobs. Each part runs in its own process and is ended at its time
limit; the result of each job is written to `accelerator.jsonl` immediately. `--missing`
runs the jobs of the selected parts that have no result on this device. If a job runs
out of device memory or lacks a file, its row says so. The exit status is 1 if a kernel
is wrong, a text differs, or a job fails for another reason.

`--split_weights=FOLDER` writes the file of SmolLM2 in parts, which `--weights=FOLDER`
reads on a machine without a network; without the flag, parts in the folders `weights`
here and beside this folder are used. `--tables` writes the tables of
docs/measured.md from the results.
"""

import importlib
import multiprocessing
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

# Wheels of pure Python can be imported as they are.
sys.path += map(str, sorted(pathlib.Path("wheels").glob("*.whl")))

import jax
from absl import flags

from benchmarks import records
from benchmarks.accelerator_parts import results
from benchmarks.accelerator_parts.jobs import JobSettings, Part, Row
from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import choice, each, integer
from bpd_jax.decoding.loading import find_packaged
from bpd_jax.evaluation import decode_flags
from bpd_jax.formats.file_parts import split_file
from bpd_jax.storage.paths import as_path

PART = cli.DEFINE_checked(
    "part", ",".join(results.PARTS), "parts to run.", each(choice(*results.PARTS))
)
PLATFORM = flags.DEFINE_enum(
    "platform", None, ["gpu", "tpu", "cpu"], "required platform of jax; default: any."
)
ONLY = flags.DEFINE_string("only", "", "only jobs whose name contains this text.")
MISSING = flags.DEFINE_bool("missing", False, "only jobs without a result.")
MINUTES = flags.DEFINE_float("minutes", 14.0, "time limit of all parts together.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "repetitions of each measurement.", 1)
BATCH_SIZES = cli.DEFINE_checked(
    "batch_sizes", "1,8,32", "prompts together.", each(integer(1))
)
TINY = flags.DEFINE_bool("tiny", False, "sizes of a test: seconds on a CPU.")
OUTPUT = cli.DEFINE_path(
    "output", str(results.FOLDER), "folder of the results, also under gs://."
)
TABLES = flags.DEFINE_bool("tables", False, f"write the tables of {results.PAGE}.")
SPLIT_WEIGHTS = cli.DEFINE_path(
    "split_weights", None, "folder to write the file of SmolLM2 to, in parts."
)

_PART_BYTES = 25_000_000
_PROMPTS = pathlib.Path(__file__).parent / "accelerator_parts" / "prompts.txt"


def main() -> None:
    """Splits weights, writes tables, or runs the parts."""
    if SPLIT_WEIGHTS.value:
        file = find_packaged("smollm2")
        parts = split_file(file, SPLIT_WEIGHTS.value, _PART_BYTES)
        print(f"{SPLIT_WEIGHTS.value}: {file.name} in {len(parts)} parts")
        return
    folder = as_path(OUTPUT.value)
    if TABLES.value:
        results.update_page(results.PAGE, results.read(folder))
        print(f"{results.PAGE}: tables of {folder}")
        return
    if TINY.value and flags.FLAGS["output"].using_default_value:
        raise UserError("--tiny measures nothing: give another folder as --output.")
    results.read(folder)  # Damaged lines are reported before the work.
    end = time.monotonic() + 60 * MINUTES.value
    if not decode_flags.PROMPTS_FILE.value:
        flags.FLAGS["prompts_file"].value = [str(_PROMPTS)]
    left = []
    # One after another; tiny ones, which measure nothing, at the same time.
    at_once = 4 if TINY.value else 1
    for first in range(0, len(PART.value), at_once):
        parts = PART.value[first : first + at_once]
        running = [_start(part, folder, end) for part in parts]
        pairs = zip(parts, running, strict=True)
        left += [part for part, each in pairs if not _finish(part, folder, each)]
    rows = [row for row in results.read(folder) if row["part"] in PART.value]
    print(f"{len(rows)} results in {folder / results.FILE}")
    if left:
        print(f"not finished: {', '.join(left)}; --missing runs what has no result yet")
    wrong = [row for row in rows if not row.get("passed", True)]
    if wrong:
        names = ", ".join(f"{row['part']}: {row['job']}" for row in wrong)
        raise UserError(f"wrong results: {names}; the file has the rest.")


class _Running(NamedTuple):
    """A process that runs a part, what it sends, and the time at which it is ended."""

    child: BaseProcess
    receiver: Connection
    end: float


def _start(part: str, folder: pathlib.Path, end: float) -> _Running | None:
    """Runs a part in its own process; None if there is no time left.

    The process is a copy of this one, which has imported everything, but does not use
    jax's devices.
    """
    now = time.monotonic()
    limit = min(results.PARTS[part], end - now)
    if limit <= 0:
        return None
    print(f"{part}: at most {limit:.0f} seconds", flush=True)
    processes = multiprocessing.get_context("fork")
    receiver, sender = processes.Pipe(duplex=False)
    child = processes.Process(target=_part, args=(part, folder, limit, sender))
    child.start()
    sender.close()
    return _Running(child, receiver, now + limit)


def _finish(part: str, folder: pathlib.Path, running: _Running | None) -> bool:
    """Waits for a part; returns whether it ended by itself."""
    if running is None:
        return False
    child, receiver, end = running
    child.join(max(end - time.monotonic(), 0))
    if child.is_alive():
        child.kill()
        child.join()
        return False
    if child.exitcode == 0:
        return True
    # Without a row, what happened would be lost.
    try:
        about = receiver.recv()
    except EOFError:
        raise UserError(f"{part}: jax did not start; see above.") from None
    if isinstance(about, str):
        raise UserError(about)
    row = {"failed": f"exit status {child.exitcode}", "passed": False}
    results.append(folder, {**about, "job": "the process", **row})
    return False


def _part(part: str, folder: pathlib.Path, limit: float, sender: Connection) -> None:
    """Runs the jobs of a part and writes a line for each."""
    # Tiny programs are compiled longer than they run.
    jax.config.update("jax_disable_most_optimizations", TINY.value)
    platform = jax.default_backend()
    if PLATFORM.value not in (None, platform):
        sender.send(
            f"jax has no {PLATFORM.value} here, only {platform}: install jax for it, "
            "as in pip install -e '.[cuda13]' or '.[tpu]'."
        )
        sys.exit(1)
    device = jax.devices()[0].device_kind
    about: dict[str, Any] = {
        "part": part,
        "device": device,
        "platform": platform,
        "tiny": TINY.value,
        **{k: v for k, v in records.about("accelerator").items() if k != "device"},
    }
    sender.send(about)
    settings = JobSettings(TINY.value, ROUNDS.value, BATCH_SIZES.value, limit)
    done = {
        row["job"]
        for row in results.read(folder)
        if (row["part"], row["device"]) == (part, device) and "failed" not in row
    }
    run: Part = importlib.import_module(f"benchmarks.accelerator_parts.{part}").jobs
    try:
        # One after another: what a job loads is freed before the next one.
        for name, job in run(settings):
            if ONLY.value not in name or (MISSING.value and name in done):
                continue
            start = time.perf_counter()
            row = _measured(job)
            seconds = time.perf_counter() - start
            row = {**about, "job": name, "seconds_of_the_job": seconds, **row}
            results.append(folder, row)
            print(f"  {name}: {row.get('failed', f'{seconds:.1f} s')}", flush=True)
    except UserError as error:  # A file is missing that all jobs need.
        results.append(folder, {**about, "job": "all", "failed": str(error)})
        print(f"  {error}", flush=True)


def _measured(job: Callable[[], Row]) -> Row:
    """The result of a job, or its failure."""
    try:
        return job()
    except UserError as error:  # A file is missing.
        return {"failed": str(error)}
    except (RuntimeError, ValueError) as error:  # What jax and its compilers raise.
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        if "RESOURCE_EXHAUSTED" in str(error):
            return {"failed": reason}
        traceback.print_exc()
        return {"failed": reason, "passed": False}


if __name__ == "__main__":
    cli.run(main)
