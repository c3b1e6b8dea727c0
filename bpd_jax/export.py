"""Exports trained block heads to another engine.

    python -m bpd_jax.export --model=smollm2 --heads=bpd_jax/shipped/smollm2/medusa \\
        --format=vllm --base=HuggingFaceTB/SmolLM2-135M-Instruct --output=exported

Only Medusa heads can be exported; those that smollm2 drafts with by default are
feed-forward heads, which are refused. Only the heads are written: the base model stays
unchanged, and n-gram models are not exported, because no other engine refines drafts
with them. docs/export.md describes the layouts.
"""

from absl import flags

from bpd_jax import cli, folders
from bpd_jax.decoding.loading import load_model
from bpd_jax.models.config import BlockHeadsConfig
from bpd_jax.pretrained.medusa_export import DTYPES, KIND, export_heads, vllm_command
from bpd_jax.pretrained.medusa_layout import CONFIG, LAYOUTS, VLLM

_MODEL = flags.DEFINE_string(
    "model",
    None,
    "the base: Hugging Face folder, GGUF file, run folder, or a known name (smollm2).",
)
_HEADS = flags.DEFINE_string(
    "heads", None, "folder of block heads; default: the model's own."
)
_FORMAT = flags.DEFINE_enum(
    "format",
    VLLM.name,
    list(LAYOUTS),
    "layout: vllm, or medusa, that of FasterDecoding.",
)
_BASE = flags.DEFINE_string(
    "base", None, "name or path of the base for the other engine; default --model."
)
_PRECISION = flags.DEFINE_enum(
    "precision", "bfloat16", DTYPES, "of the numbers that are stored."
)
_OUTPUT = flags.DEFINE_string("output", None, "folder to write.")


def main() -> None:
    """Reads the flags, loads base and heads, writes the folder, says how to run it."""
    output = cli.required("output")
    folders.check_folder(output, KIND)
    loaded = load_model(cli.required("model"), _HEADS.value)
    base = _BASE.value or cli.required("model")
    config = loaded.functions.config
    export_heads(
        output,
        config,
        loaded.params,
        layout=_FORMAT.value,
        base=base,
        dtype=_PRECISION.value,
    )
    assert config.heads is not None
    print(
        f"{_described(config.heads)} of {loaded.name} written to {output}: {CONFIG} "
        f"and {LAYOUTS[_FORMAT.value].file}, {_PRECISION.value}."
    )
    if _FORMAT.value == VLLM.name:
        print(vllm_command(base, output, config.heads.num_heads - 1))
        print(
            "vLLM drafts one chain, the first choice of every head: no tree and no "
            "refinement by n-grams. What it writes is the base's own."
        )
    elif config.heads.draft_vocabulary is not None:
        print(
            "This layout has no draft vocabulary: there the heads choose from all "
            f"{loaded.vocab_size:,} tokens, with the softmax of the base."
        )


def _described(heads: BlockHeadsConfig) -> str:
    words = f"{heads.num_heads - 1} Medusa heads"
    if heads.own_softmax:
        return f"{words} with a softmax each"
    if heads.draft_vocabulary is not None:
        return f"{words} over {heads.draft_vocabulary:,} tokens"
    return words


if __name__ == "__main__":
    cli.run(main)
