"""Exports a run without its training state, so that the model is small to distribute.

    python -m bpd_jax.export_params --model=runs/smollm2/rescorer --output=rescorer

The output folder can be used like the run folder itself: `--model=`, `--rescorer=`,
`--draft_model=`. A model that was trained with products in bfloat16 decodes faster on a
CPU in float32: `--dtype=float32 --precision=float32`.
"""

from absl import flags

from bpd_jax.base import cli
from bpd_jax.models.stored_tensors import STORED_DTYPES
from bpd_jax.models.transformer_config import DTYPES
from bpd_jax.training.exported_params import write_exported

_MODEL = cli.DEFINE_path("model", None, "Run folder.")
_OUTPUT = cli.DEFINE_path("output", None, "Folder to write.")
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "bfloat16",
    STORED_DTYPES,
    "precision of the stored parameters; compact takes about 4 bits per parameter.",
)
_PRECISION = flags.DEFINE_enum(
    "precision",
    None,
    DTYPES,
    "Activations and products of the exported model. Default: as in the run.",
)
_PACKED = flags.DEFINE_bool(
    "packed", False, "compress the parameters without loss: bfloat16 to two thirds."
)


def main() -> None:
    """Writes the folder and prints its size."""
    run, output = cli.required("model"), cli.required("output")
    size = write_exported(run, output, _DTYPE.value, _PRECISION.value, _PACKED.value)
    print(f"{output}: {size:,} bytes of parameters")


if __name__ == "__main__":
    cli.run(main)
