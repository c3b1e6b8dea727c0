"""Exports trained block heads or a block drafter for another engine.

    python -m bpd_jax.export --model=smollm2 --heads=runs/smollm2/medusa/heads \\
        --format=vllm --base=HuggingFaceTB/SmolLM2-135M-Instruct --output=exported
    python -m bpd_jax.export --model=models/mine --drafter=runs/mine/drafter/drafter \\
        --format=speculators --base=org/mine --output=exported

Only Medusa heads can be exported, not feed-forward heads. The base model is not
changed, and n-gram models are not exported, because no other engine refines drafts with
them. docs/export.md describes the layouts.
"""

from absl import flags

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.asset_files import read_drafter
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.loading import load_model
from bpd_jax.formats import drafter_export
from bpd_jax.formats.json_files import CONFIG
from bpd_jax.formats.medusa_export import KIND, LAYOUTS, VLLM, export_heads
from bpd_jax.formats.safetensors_files import SINGLE, TENSOR_DTYPES, vllm_command
from bpd_jax.models.attachment_files import attach_drafter
from bpd_jax.storage import folders

SPECULATORS = "speculators"
_CHAIN = (
    "vLLM drafts a single chain of the best token at every position, without trees and "
    "without n-gram refinement. Its texts are those of the base model."
)

_MODEL = flags.DEFINE_string(
    "model",
    None,
    "the base: Hugging Face folder, GGUF file, run folder, or a known name (smollm2).",
)
_HEADS = flags.DEFINE_string(
    "heads", None, "folder of block heads; default: the model's own."
)
_DRAFTER = flags.DEFINE_string(
    "drafter",
    None,
    "for --format=speculators: folder of a block drafter; default: that in the model's "
    "folder.",
)
_FORMAT = flags.DEFINE_enum(
    "format",
    VLLM.name,
    [*LAYOUTS, SPECULATORS],
    "layout: for heads vllm, or medusa, which FasterDecoding uses; for a block drafter "
    "speculators, which vLLM reads.",
)
_BASE = flags.DEFINE_string(
    "base", None, "name or path of the base for the other engine; default: --model."
)
_PRECISION = flags.DEFINE_enum(
    "precision", "bfloat16", TENSOR_DTYPES, "dtype of the stored tensors."
)
_OUTPUT = flags.DEFINE_string("output", None, "folder to write.")


def main() -> None:
    """Loads base and heads or drafter, and writes the folder."""
    output = cli.required("output")
    if _FORMAT.value == SPECULATORS:
        if _HEADS.value is not None:
            raise UserError(
                "--format=speculators is for block drafters: give --drafter, or "
                "another --format for --heads."
            )
        folders.check_folder(output, drafter_export.KIND)
        _export_drafter(load_model(cli.required("model")), output)
        return
    if _DRAFTER.value is not None:
        raise UserError("--drafter requires --format=speculators.")
    folders.check_folder(output, KIND)
    _export_heads(load_model(cli.required("model"), _HEADS.value), output)


def _export_heads(loaded: LanguageModel, output: str) -> None:
    base = _BASE.value or cli.required("model")
    config = loaded.config
    export_heads(
        output,
        config,
        loaded.params,
        layout=_FORMAT.value,
        base=base,
        dtype=_PRECISION.value,
    )
    heads = config.heads
    assert heads is not None
    kind = f"{heads.num_heads - 1} Medusa heads"
    if heads.own_softmax:
        kind += " with a softmax each"
    elif heads.draft_vocabulary is not None:
        kind += f" over {heads.draft_vocabulary:,} tokens"
    print(
        f"{kind} of {loaded.name} written to {output}: {CONFIG} and "
        f"{LAYOUTS[_FORMAT.value].file}, {_PRECISION.value}."
    )
    if _FORMAT.value == VLLM.name:
        print(vllm_command(base, "medusa", output, heads.num_heads - 1))
        print(_CHAIN)
    elif heads.draft_vocabulary is not None:
        print(
            "This layout has no draft vocabulary: the exported heads predict over all "
            f"{loaded.vocab_size:,} tokens, with the softmax of the base."
        )


def _export_drafter(loaded: LanguageModel, output: str) -> None:
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
    base = _BASE.value or cli.required("model")
    # Nothing is drafted after a token that the tokenizer does not use, or the end of
    # text, so that its embedding can be replaced.
    token = loaded.tokenizer.vocab_size
    token = token if token < loaded.vocab_size else loaded.end_tokens[0]
    drafter_export.export_drafter(
        output,
        model,
        loaded.params,
        drafter,
        base=base,
        mask_token=token,
        dtype=_PRECISION.value,
    )
    config = drafter.config
    method = drafter_export.served_method(config)
    print(
        f"block drafter of {loaded.name} with {config.num_layers} layers ({method}) "
        f"written to {output}: {CONFIG} and {SINGLE}, {_PRECISION.value}; the "
        f"embedding of token {token} is the mask embedding."
    )
    print(vllm_command(base, method, output, config.block_size - 1))
    print(_CHAIN)


if __name__ == "__main__":
    cli.run(main)
