"""Writes a folder that checks an accelerator on a machine without a network.

    make gpu-bundle PART=1

The folder has at most 55 MiB: the sources that `benchmarks.accelerator` needs, wheels
of gin-config and gguf, packed rows of text to train on, one part of the weights of
SmolLM2, and `run.sh`, which runs the check there. A machine with jax, flax, optax,
Orbax and tokenizers needs nothing else. `--part=2`, 3, ... write the same with the
further parts of the weights; put the folders beside each other, and the check joins the
parts when all of them are there. Until then everything runs but the part `smollm2`.
"""

import pathlib
import shutil
import subprocess
import sys

from absl import flags

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.data.row_preparation import prepare_rows
from bpd_jax.data.text_task import TextTask
from bpd_jax.decoding.loading import find_packaged
from bpd_jax.formats.file_parts import HEADER, split_file
from bpd_jax.storage import files, folders

PART = flags.DEFINE_integer("part", 1, "part of the weights to include, from 1.")
WEIGHTS = flags.DEFINE_bool("weights", True, "whether to include a part of them.")
WHEELS = cli.DEFINE_path(
    "wheels", None, "folder of the wheels; default: pip downloads them."
)
TEXT_BYTES = flags.DEFINE_integer("text_bytes", 4_000_000, "bytes of text to include.")
HELDOUT_SHARE = flags.DEFINE_float(
    "heldout_share", 0.05, "share of the documents to decode, not to train on."
)
VOCABULARY = cli.DEFINE_path("vocabulary", "gpt3", "vocabulary of the rows.")
OUTPUT = cli.DEFINE_path("output", "build/gpu_bundle_1", "folder to write.")

MOST_BYTES = 55 * 2**20
PART_BYTES = 25_000_000
PACKAGES = ("gin-config", "gguf")
SOURCES = ("bpd_jax", "benchmarks", "gin_configs", "LICENSE")

MARKER = "bundle.json"
KIND = folders.FolderKind(
    "a bundle",
    MARKER,
    (*SOURCES, "wheels", "corpus", "weights", "run.sh", "results", "build"),
    '"part"',
)
_RUN = """#!/bin/sh
# Checks the accelerator of this machine; results are in results/accelerator.jsonl.
cd "$(dirname "$0")" || exit 1
exec "${PYTHON:-python3}" -m benchmarks.accelerator --output=results "$@"
"""


def main() -> None:
    """Writes the folder and prints its size."""
    root = pathlib.Path(__file__).resolve().parent.parent
    with folders.replacing_folder(OUTPUT.value, KIND) as bundle:
        _copy_sources(root, bundle)
        _copy_wheels(root, bundle / "wheels")
        _write_rows(bundle / "corpus")
        if WEIGHTS.value:
            _write_part(bundle / "weights")
        (bundle / "run.sh").write_text(_RUN)
        (bundle / "run.sh").chmod(0o755)
        sizes = {
            path.name: sum(f.stat().st_size for f in (path, *path.rglob("*")))
            for path in bundle.iterdir()
        }
        total = sum(sizes.values())
        files.write_json(bundle / MARKER, {"part": PART.value, "bytes": sizes})
        if total > MOST_BYTES:
            raise UserError(
                f"the bundle would have {total / 2**20:.0f} MiB of at most 55: include "
                "less with --text_bytes."
            )
    print(f"{OUTPUT.value}: {total / 2**20:.1f} MiB; run there: sh run.sh")


def _copy_sources(root: pathlib.Path, bundle: pathlib.Path) -> None:
    """Copies the tracked files of `SOURCES`."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--", *SOURCES]
    try:
        listed = subprocess.run(command, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            "a bundle is made in a checkout, whose files git lists; git failed."
        ) from error
    for name in filter(None, listed.decode().split("\0")):
        source = root / name
        if source.is_file():
            target = bundle / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _copy_wheels(root: pathlib.Path, folder: pathlib.Path) -> None:
    if WHEELS.value is not None:
        found = sorted(pathlib.Path(WHEELS.value).glob("*.whl"))
        folder.mkdir()
        for wheel in found:
            shutil.copy(wheel, folder)
        if len(found) < len(PACKAGES):
            raise UserError(f"{WHEELS.value} lacks wheels of {' and '.join(PACKAGES)}.")
        return
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    command += ["--constraint", str(root / "requirements.txt"), *PACKAGES]
    if subprocess.run(command, check=False).returncode:
        raise UserError(
            f"pip cannot download {' and '.join(PACKAGES)}: give --wheels=FOLDER."
        )


def _write_rows(folder: pathlib.Path) -> None:
    """Rows of 512 tokens: source code of Python's standard library."""
    task = TextTask(
        vocabulary=VOCABULARY.value,
        max_bytes=TEXT_BYTES.value,
        validation_fraction=HELDOUT_SHARE.value,
    )
    for split in ("train", "validation"):
        prepare_rows(task, split, 512, folder / split)


def _write_part(folder: pathlib.Path) -> None:
    """One part of the weights, with the manifest of all."""
    parts = split_file(find_packaged("smollm2"), folder, PART_BYTES)
    if not 1 <= PART.value <= len(parts):
        raise UserError(
            f"--part={PART.value}: the weights have parts 1 to {len(parts)}."
        )
    kept = {HEADER, parts[PART.value - 1].name}
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()


if __name__ == "__main__":
    cli.run(main)
