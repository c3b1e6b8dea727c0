"""Benchmarks of an accelerator, in five independent parts.

    python -m benchmarks.accelerator --platform=gpu --part=attention,plain

`make gpu-check PART=plain` and `make tpu-check` call it. It needs neither a network nor
TensorFlow, seqio or pynini. Parts:

    attention   attention kernels against a float32 reference: errors and time
    plain       plain decoding against the time of reading the weights once
    smollm2     SmolLM2 with the shipped drafters, at batch sizes 1, 8 and 32
    shapes      random weights at 1.5B and 7B: passes, drafting, refinement
    training    a training step of the paper's 1.5B model: tokens per second, MFU

A part is a list of jobs; the result of each is written to
`accelerator_DEVICE_PART.json` immediately, and those of other jobs are kept. No job
starts after `--minutes`; `--missing` runs the remaining ones. If a job runs out of
device memory, its row records this. The exit status is 1 if a kernel is wrong, a text
differs, or a job fails for another reason.

`--split_weights=FOLDER` writes the file of SmolLM2 in parts of at most 60 MB, which
`--weights=FOLDER` reads on a machine without a network. `--tables` writes the tables of
docs/accelerators.md from the results.
"""

import importlib
import pathlib
import time
import traceback
from collections.abc import Callable

import jax
from absl import flags

from benchmarks import records
from benchmarks.accelerator_parts import results
from benchmarks.accelerator_parts.jobs import JobSettings, Part, Row
from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError
from bpd_jax.evaluation import decode_flags
from bpd_jax.pretrained.file_parts import split_file
from bpd_jax.pretrained.packaged_models import find_packaged

PART = flags.DEFINE_list("part", list(results.PARTS), "parts to run.")
PLATFORM = flags.DEFINE_enum(
    "platform", None, ["gpu", "tpu", "cpu"], "required platform of jax; default: any."
)
ONLY = flags.DEFINE_string("only", "", "only jobs whose name contains this text.")
MISSING = flags.DEFINE_bool("missing", False, "only jobs without a result.")
MINUTES = flags.DEFINE_float("minutes", 7.0, "time limit for starting jobs.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "repetitions of each measurement.")
BATCH_SIZES = flags.DEFINE_list("batch_sizes", ["1", "8", "32"], "prompts together.")
TINY = flags.DEFINE_bool("tiny", False, "sizes of a test: seconds on a CPU.")
OUTPUT = flags.DEFINE_string("output", str(results.FOLDER), "folder of the results.")
TABLES = flags.DEFINE_bool("tables", False, f"write the tables of {results.PAGE}.")
SPLIT_WEIGHTS = flags.DEFINE_string(
    "split_weights", None, "folder to write the file of --model to, in parts."
)
PART_MEGABYTES = flags.DEFINE_integer("part_megabytes", 60, "of a part, at most.")

_PROMPTS = pathlib.Path(__file__).parent / "accelerator_parts" / "prompts.txt"


def main() -> None:
    """Splits weights, writes tables, or runs the benchmarks."""
    if SPLIT_WEIGHTS.value:
        file = find_packaged("smollm2")
        size = PART_MEGABYTES.value * 10**6
        parts = split_file(file, SPLIT_WEIGHTS.value, size)
        print(f"{SPLIT_WEIGHTS.value}: {file.name} in {len(parts)} parts")
        return
    folder = pathlib.Path(OUTPUT.value)
    if TABLES.value:
        results.update_page(results.PAGE, folder)
        print(f"{results.PAGE}: tables of {folder}")
        return
    settings = _settings()
    deadline = time.monotonic() + 60 * MINUTES.value
    if not decode_flags.PROMPTS_FILE.value:
        flags.FLAGS["prompts_file"].value = [str(_PROMPTS)]
    wrong, left = [], []
    for part in PART.value:
        if time.monotonic() > deadline:
            left.append(part)
            continue
        failed, waiting = _run(part, settings, folder, deadline)
        wrong += failed
        left += waiting
    if left:
        print(
            f"no time for: {', '.join(left)}; run again with --missing for what has "
            "no result yet."
        )
    if wrong:
        raise UserError(f"wrong results: {', '.join(wrong)}; the files have the rest.")


def _settings() -> JobSettings:
    """The validated settings of the flags."""
    unknown = [part for part in PART.value if part not in results.PARTS]
    if unknown or not PART.value:
        raise UserError(
            f"--part={','.join(PART.value)} is unknown: choose from "
            f"{', '.join(results.PARTS)}."
        )
    sizes = cli.whole_numbers("batch_sizes") or ()
    if not sizes or min(sizes) < 1 or ROUNDS.value < 1:
        raise UserError("--batch_sizes and --rounds must be 1 or more.")
    if TINY.value and flags.FLAGS["output"].using_default_value:
        raise UserError("--tiny measures nothing: give another folder as --output.")
    platform = jax.default_backend()
    if PLATFORM.value not in (None, platform):
        raise UserError(
            f"jax has no {PLATFORM.value} here, only {platform}: install jax for it, "
            "as in pip install -e '.[cuda13]' or '.[tpu]'."
        )
    return JobSettings(TINY.value, ROUNDS.value, tuple(sizes))


def _run(
    part: str, settings: JobSettings, folder: pathlib.Path, deadline: float
) -> tuple[list[str], list[str]]:
    """Runs the jobs of a part; returns the failed and the remaining ones."""
    run: Part = importlib.import_module(f"benchmarks.accelerator_parts.{part}").jobs
    device = jax.devices()[0].device_kind
    path = results.path_of(folder, device, part)
    part_results = results.read(path) or {"part": part}
    part_results |= {"device": device, "platform": jax.default_backend()}
    rows = part_results.setdefault("rows", {})
    wrong, left = [], []
    with progress.bar(label=part, unit=" jobs") as bar:
        for name, job in run(settings):
            if ONLY.value not in name or (MISSING.value and name in rows):
                continue
            if time.monotonic() > deadline:
                left.append(f"{part}: {name}")
                continue
            bar.set_postfix_str(name)
            start = time.perf_counter()
            row = _measured(job)
            rows[name] = {
                **row,
                "seconds_of_the_job": time.perf_counter() - start,
                **records.about("accelerator"),
                "tiny": settings.tiny,
            }
            records.write(path, part_results, indent=1)
            if not row.get("passed", True):
                wrong.append(f"{part}: {name}")
            bar.update(1)
    print(f"{part}: {len(rows)} results in {path}")
    return wrong, left


def _measured(job: Callable[[], Row]) -> Row:
    """The result of a job, or its failure."""
    try:
        return job()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        if "RESOURCE_EXHAUSTED" in str(error):
            return {"failed": reason}
        traceback.print_exc()
        return {"failed": reason, "passed": False}


if __name__ == "__main__":
    cli.run(main)
