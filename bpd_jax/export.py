"""Exports a block drafter in the layout of speculators, which vLLM reads.

    python -m bpd_jax.export --model=models/mine --drafter=runs/mine/drafter/drafter \\
        --base=org/mine --output=exported

The base model is not changed. Block heads and n-gram models are not exported: no other
engine refines drafts with them. docs/export.md describes the layout.
"""

from absl import flags

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.asset_files import read_drafter
from bpd_jax.decoding.loading import load_model
from bpd_jax.formats.drafter_export import (
    KIND,
    TENSOR_DTYPES,
    export_drafter,
    served_method,
    vllm_command,
)
from bpd_jax.formats.json_files import CONFIG
from bpd_jax.formats.safetensors_files import SINGLE
from bpd_jax.models.attachment_files import attach_drafter
from bpd_jax.storage import folders

_MODEL = cli.DEFINE_path(
    "model",
    None,
    "the base: Hugging Face folder, GGUF file, run folder, or a known name (smollm2).",
)
_DRAFTER = cli.DEFINE_path(
    "drafter",
    None,
    "folder of a block drafter; default: that in the model's folder.",
)
_BASE = cli.DEFINE_path(
    "base", None, "name or path of the base for the other engine; default: --model."
)
_PRECISION = flags.DEFINE_enum(
    "precision", "bfloat16", TENSOR_DTYPES, "dtype of the stored tensors."
)
_OUTPUT = cli.DEFINE_path("output", None, "folder to write.")


def main() -> None:
    """Loads base and drafter, and writes the folder."""
    output, name = cli.required("output"), cli.required("model")
    folders.check_folder(output, KIND)
    loaded = load_model(name)
    folder = _DRAFTER.value or loaded.find_asset("drafter")
    if folder is None:
        raise UserError(
            f"{loaded.name} has no folder with a block drafter: give one with "
            "--drafter."
        )
    drafter = read_drafter(loaded, folder)
    model = loaded.config
    # Checks that the drafter belongs to the model.
    attach_drafter(model, loaded.params, drafter, name=loaded.name)
    base = _BASE.value or name
    # Nothing is drafted after a token that the tokenizer does not use, or the end of
    # text, so that its embedding can be replaced.
    token = loaded.tokenizer.vocab_size
    token = token if token < loaded.vocab_size else loaded.end_tokens[0]
    export_drafter(
        output,
        model,
        loaded.params,
        drafter,
        base=base,
        mask_token=token,
        dtype=_PRECISION.value,
    )
    config = drafter.config
    method = served_method(config)
    print(
        f"block drafter of {loaded.name} with {config.num_layers} layers ({method}) "
        f"written to {output}: {CONFIG} and {SINGLE}, {_PRECISION.value}; the "
        f"embedding of token {token} is the mask embedding."
    )
    print(vllm_command(base, method, output, config.block_size - 1))
    print(
        "vLLM drafts a single chain of the best token at every position, without trees "
        "and without n-gram refinement. Its texts are those of the base model."
    )


if __name__ == "__main__":
    cli.run(main)
