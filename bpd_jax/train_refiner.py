"""Trains a refiner, a small module that conditions the heads on the preceding draft.

    python -m bpd_jax.train_refiner --model=runs/demo --kind=markov
    python -m bpd_jax.train_refiner --model=runs/demo --kind=recurrent --rank=32 \\
        --width=64 --output=small_recurrent
    python -m bpd_jax.train_refiner --model=smollm2 --kind=hydra \\
        --data=runs/smollm2/states

The model is not changed. Training takes minutes; after an interruption the same command
resumes it.
"""

import shlex
import sys

from absl import flags

from bpd_jax.base import cli
from bpd_jax.decoding.loading import load_model
from bpd_jax.models.cpu.host import keep_freed_memory
from bpd_jax.reporting.terminal import print_rows
from bpd_jax.storage.paths import as_path
from bpd_jax.training.refiner_sources import RefinerSettings, default_data
from bpd_jax.training.refiners import train_refiner

FOLDER = "refiners"

_MODEL = flags.DEFINE_string(
    "model",
    None,
    "Run folder, checkpoint folder, Hugging Face folder, GGUF file, or a known name "
    "(smollm2, demo).",
)
_HEADS = flags.DEFINE_string(
    "heads", None, "Folder of block heads for a pretrained model; default: its own."
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "Folder to write. Default: refiners/KIND in the run folder; that of a pretrained "
    "model is runs/NAME.",
)
_DATA = flags.DEFINE_string(
    "data",
    None,
    "Folder of packed rows, with train/ and validation/, or of the cached states of "
    "heads training. Default: data/ in the run folder, or else states/.",
)
cli.define_flags(RefinerSettings)


def main() -> None:
    """Trains the refiner and prints its accuracies."""
    keep_freed_memory()
    name = cli.required("model")
    cli.required("kind")
    settings = RefinerSettings(**cli.flag_values(RefinerSettings))
    loaded = load_model(name, _HEADS.value)
    output = as_path(_OUTPUT.value or loaded.folder / FOLDER / settings.kind)
    report = train_refiner(
        settings,
        loaded.config,
        loaded.params,
        _DATA.value or default_data(loaded.folder),
        output,
        command=shlex.join(["python", "-m", "bpd_jax.train_refiner", *sys.argv[1:]]),
    )
    columns, names = report.held_out.table(), report.held_out._fields
    accuracies = zip(*(columns[f"{name}_accuracy"] for name in names), strict=True)
    print_rows(
        ["head", "text: plain", "refined", "model: plain", "refined"],
        (
            [str(head), *(f"{value:.1%}" for value in values)]
            for head, values in enumerate(accuracies, start=2)
        ),
        title="top-1 accuracy on held-out text, given the true preceding tokens",
        left=0,
    )
    print(
        f"trained {settings.steps:,} steps in {report.seconds:.0f} s; the refiner is "
        f"in {output}"
    )


if __name__ == "__main__":
    cli.run(main)
