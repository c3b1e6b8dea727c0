"""Imports published Medusa heads as block heads of a pretrained model.

    python -m bpd_jax.import_heads --model=models/vicuna-7b \\
        --medusa=models/medusa-vicuna-7b --output=runs/vicuna-7b/heads

The folder may have the layout of vLLM or of FasterDecoding, and may contain only heads
or a complete model with heads. `--model` must be the model that the heads were trained
on; the files do not record it. docs/export.md describes the layouts.
"""

from absl import flags

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.loading import load_model
from bpd_jax.formats.medusa_import import import_heads
from bpd_jax.models.attachment_files import HEADS_KIND, save_heads
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.stored_tensors import STORED_DTYPES
from bpd_jax.storage import folders
from bpd_jax.storage.paths import as_path

MODEL = cli.DEFINE_path(
    "model",
    None,
    "the base of the heads: Hugging Face folder, GGUF file, or a known name (smollm2).",
)
MEDUSA = cli.DEFINE_path(
    "medusa", None, "folder with config.json and safetensors files of Medusa heads."
)
PRECISION = flags.DEFINE_enum(
    "precision", "bfloat16", STORED_DTYPES, "dtype of the stored tensors."
)
OUTPUT = cli.DEFINE_path("output", None, "folder of block heads to write.")


def main() -> None:
    """Loads the base, reads the heads, and writes them as block heads."""
    name, folder = cli.required("model"), as_path(cli.required("medusa"))
    output = cli.required("output")
    folders.check_folder(output, HEADS_KIND)
    loaded = load_model(name)
    if loaded.task is not None:
        raise UserError(
            f"--model={name} is a run of bpd_jax with heads of its own: give the "
            "pretrained model that the Medusa heads belong to."
        )
    model = loaded.config
    config, params = import_heads(folder, model.trunk)
    save_heads(
        output,
        config,
        params,
        base=fingerprint(model, loaded.params),
        base_name=loaded.name,
        d_model=model.trunk.d_model,
        vocab_size=model.trunk.vocab_size,
        facts={"imported_from": folder.resolve().name},
        dtype=PRECISION.value,
    )
    softmax = "a softmax each" if config.own_softmax else "the softmax of the base"
    tokens = config.draft_vocabulary or loaded.vocab_size
    print(
        f"{config.num_heads - 1} Medusa heads with {softmax} over {tokens:,} tokens "
        f"written to {output}: they predict 2 to {config.num_heads} tokens ahead."
    )
    print(
        f"python -m bpd_jax.decode --model={name} --heads={output} --method=medusa:16 "
        "--prompt=Hello"
    )


if __name__ == "__main__":
    cli.run(main)
