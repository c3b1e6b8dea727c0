"""Flags and setup that `decode`, `distill`, `evaluate`, `tune` and benchmarks share.

gin files set `DecodeConfig` and `DecodeOptions`; a flag that is given overrides them.
"""

import dataclasses

from absl import flags

from bpd_jax import api
from bpd_jax.base import cli, configuration, progress
from bpd_jax.data.text_readers import read_prompts_file
from bpd_jax.decoding.chat import template_variables
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import Task
from bpd_jax.decoding.options import GIN_DEFAULTS, DecodeConfig, DecodeOptions
from bpd_jax.drafting.assets import AssetPaths
from bpd_jax.models.transformer_config import PRECISIONS
from bpd_jax.training import process_flags

MODEL = cli.DEFINE_path(
    "model",
    None,
    "run folder, checkpoint folder, Hugging Face folder, GGUF file, ORG/NAME of the "
    "Hugging Face hub, or a known name (smollm2, demo).",
)
HEADS = cli.DEFINE_path(
    "heads", None, "folder of block heads for a pretrained model; default: its own."
)
WEIGHTS = cli.DEFINE_path(
    "weights",
    None,
    "folder with the file of a known model in parts, on hosts without its package; "
    "python -m benchmarks.accelerator --split_weights=FOLDER writes it.",
)
CHAT = flags.DEFINE_bool(
    "chat",
    True,
    "whether a prompt is a user message, if the model has a chat template; with "
    "--nochat the model continues the text of the prompt.",
)
PROMPTS_FILE = cli.DEFINE_path(
    "prompts_file",
    [],
    "one prompt per line, or JSON Lines with the field prompt; may be repeated.",
)
PRECISION = flags.DEFINE_enum(
    "precision",
    None,
    PRECISIONS,
    "dtype of activations and matrix products; int8: products of matrices and "
    "activations that are both rounded to 8 bits, on a CPU; default: the model's own.",
)
WEIGHTS_DTYPE = flags.DEFINE_enum(
    "weights_dtype",
    None,
    api.WEIGHTS,
    "stored: quantized matrices of a GGUF file stay as they are; expanded: they become "
    "float32 on loading; int8: matrices of any model are rounded to 8 bits. Default: "
    "stored where that is faster with the same texts, on CPUs in float32.",
)
cli.define_flags(DecodeOptions, "max_new_tokens", "batch_size", "verification")
cli.define_flags(
    DecodeOptions, "temperature", "top_k", "top_p", "acceptance", "seed", "stop"
)
cli.define_flags(DecodeOptions, "min_p", "repetition_penalty", "draft_noise")
cli.define_flags(DecodeConfig, "lattice_width", "alpha")
TEMPLATE_ARG = flags.DEFINE_multi_string(
    "template_arg",
    [],
    "variable of the chat template, such as enable_thinking=false; the value is JSON "
    "or else text; may be repeated.",
)
cli.define_flags(AssetPaths)


def config() -> DecodeConfig:
    """The configuration from gin files and flags; flags take precedence."""
    parsed = configuration.parse_flags(DecodeConfig, defaults=GIN_DEFAULTS)
    config = process_flags.with_mesh_if_set(parsed)
    options = dataclasses.replace(config.options, **cli.flag_values(DecodeOptions))
    return dataclasses.replace(config, options=options, **cli.flag_values(DecodeConfig))


def load(config: DecodeConfig) -> tuple[api.LanguageModel, Decoder, DecodeConfig]:
    """Loads the model that the flags name.

    Returns:
      The model, a decoder of it, and options with its end-of-text tokens unless the
      configuration sets others.
    """
    lm = api.load(
        cli.required("model"),
        heads=HEADS.value,
        weights=WEIGHTS.value,
        chat=CHAT.value,
        template=template_variables(TEMPLATE_ARG.value),
        precision=PRECISION.value,
        mesh=config.mesh,
        weights_dtype=WEIGHTS_DTYPE.value,
        **cli.flag_values(AssetPaths),
    )
    unset = {
        name: value
        for name, value in lm.option_defaults.items()
        if getattr(config.options, name) is None
    }
    options = dataclasses.replace(config.options, **unset)
    decoder = lm.decoder(lattice_width=config.lattice_width, alpha=config.alpha)
    return lm, decoder, dataclasses.replace(config, options=options)


def prompt_texts() -> list[str]:
    """The prompts of all `--prompts_file`s, in order."""
    return [text for path in PROMPTS_FILE.value for text in read_prompts_file(path)]


def print_mesh(*tasks: Task) -> None:
    """Prints the axes of the mesh, and what every device holds a copy of, if any."""
    mesh = tasks[0].mesh
    if mesh is not None:
        axes = ", ".join(f"{name} = {size}" for name, size in mesh.shape.items())
        copied = max(task.replicated_bytes for task in tasks)
        print(f"mesh: {axes}; {copied / 1e6:,.1f} MB of drafters on every device")


def token_bar(label: str, prompts: int, config: DecodeConfig) -> "progress.tqdm":
    """A progress bar over tokens; it may not reach its end, because texts may."""
    total = prompts * config.options.max_new_tokens
    return progress.bar(label=label, total=total, unit=" tokens")
