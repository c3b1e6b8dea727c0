"""Flags and set-up that `decode`, `evaluate`, `tune` and the benchmarks share.

gin files set `DecodeConfig` and `DecodeOptions`; a flag that is given overrides them.
"""

import dataclasses
from typing import Any

from absl import flags

from bpd_jax import cli, configuration, progress
from bpd_jax.data.prompts import read_prompts_file
from bpd_jax.decoding.asset_files import load_assets
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.loading import LoadedModel, load_model
from bpd_jax.decoding.options import ACCEPTANCES, VERIFICATIONS, DecodeConfig
from bpd_jax.drafting.assets import KINDS
from bpd_jax.models.config import DTYPES

MODEL = flags.DEFINE_string(
    "model",
    None,
    "run folder, checkpoint folder, Hugging Face folder, GGUF file, or a known name "
    "(smollm2, demo).",
)
HEADS = flags.DEFINE_string(
    "heads", None, "folder of block heads for a pretrained model; default: its own."
)
WEIGHTS = flags.DEFINE_string(
    "weights",
    None,
    "folder with the file of a known model in parts, on hosts without its package; "
    "python -m benchmarks.accelerator --split_weights=FOLDER writes it.",
)
CHAT = flags.DEFINE_bool(
    "chat",
    True,
    "whether a prompt is what a user says to a model that has a chat template; "
    "--nochat continues it as it is.",
)
PROMPTS_FILE = flags.DEFINE_multi_string(
    "prompts_file",
    [],
    "one prompt per line, or JSON Lines with the field prompt; may be repeated.",
)
PRECISION = flags.DEFINE_enum(
    "precision",
    None,
    DTYPES,
    "of activations and matrix products; default: the model's own.",
)
_OPTIONS: dict[str, flags.FlagHolder[Any]] = {
    flag.name: flag
    for flag in (
        flags.DEFINE_integer("max_new_tokens", None, "tokens to decode; 64."),
        flags.DEFINE_integer("batch_size", None, "prompts decoded together; 1."),
        flags.DEFINE_enum(
            "verification", None, VERIFICATIONS, "layout of drafts; default tree."
        ),
    )
}
# Of commands that sample.
_SAMPLING: dict[str, flags.FlagHolder[Any]] = {
    flag.name: flag
    for flag in (
        flags.DEFINE_float("temperature", None, "0, the default, is greedy."),
        flags.DEFINE_integer("top_k", None, "sample among the k best tokens."),
        flags.DEFINE_float("top_p", None, "sample from the best tokens of this mass."),
        flags.DEFINE_enum(
            "acceptance",
            None,
            ACCEPTANCES,
            "exact (default) and speculative are lossless, typical is not.",
        ),
        flags.DEFINE_integer("seed", None, "of the sampling noise; default 0."),
        flags.DEFINE_multi_string(
            "stop", None, "text that ends a row; may be repeated."
        ),
    )
}
_CONFIG = {
    flag.name: flag
    for flag in (
        flags.DEFINE_integer("lattice_width", None, "candidates per head (k); 16."),
        flags.DEFINE_float("alpha", None, "weight of a refiner, unless trained for 1."),
    )
}
# One for each of `drafting.assets.KINDS`.
_ASSETS = {
    flag.name: flag
    for flag in (
        flags.DEFINE_string(
            "ngram",
            None,
            "folder of an n-gram model, or a file of one: ARPA with token ids, or "
            "OpenFst (.fst). Default of this and the following flags: that of the "
            "model's folder.",
        ),
        flags.DEFINE_string(
            "rescorer", None, "run folder of a small LM, for the refiner neural."
        ),
        flags.DEFINE_string(
            "draft_model", None, "run folder of a smaller LM, for draft_model."
        ),
        flags.DEFINE_string("markov", None, "folder of a Markov refiner."),
        flags.DEFINE_string("recurrent", None, "folder of a recurrent refiner."),
        flags.DEFINE_string("hydra", None, "folder of trained Hydra heads."),
        flags.DEFINE_string(
            "drafter",
            None,
            "folder of a block drafter, for the source block: trained here, or "
            "published (dflash or dspark of speculators, z-lab or DeepSpec).",
        ),
    )
}
assert _ASSETS.keys() == KINDS.keys()


def config() -> DecodeConfig:
    """What gin and the flags say; the flags come last."""
    config = configuration.parse_decode_flags()
    given: dict[str, Any] = {}
    for name, flag in {**_OPTIONS, **_SAMPLING}.items():
        if flag.value is not None:
            given[name] = tuple(flag.value) if name == "stop" else flag.value
    options = dataclasses.replace(config.options, **given)
    given = {name: f.value for name, f in _CONFIG.items() if f.value is not None}
    return dataclasses.replace(config, options=options, **given)


def load(config: DecodeConfig) -> tuple[LoadedModel, Decoder, DecodeConfig]:
    """The model that the flags name, and a decoder of it.

    Returns:
      The options know the end-of-text token now.
    """
    loaded = load_model(cli.required("model"), HEADS.value, WEIGHTS.value)
    if not CHAT.value:
        loaded = loaded.without_chat()
    given = {name: flag.value for name, flag in _ASSETS.items()}
    assets = load_assets(loaded, given)
    if PRECISION.value:
        loaded = loaded.in_precision(PRECISION.value)
    loaded = loaded.for_decoding()
    options = dataclasses.replace(config.options, end_of_text=loaded.end_of_text)
    decoder = Decoder(
        loaded.functions,
        loaded.params,
        width=config.lattice_width,
        alpha=config.alpha,
        assets=assets,
        token_bytes=loaded.token_bytes,
    )
    return loaded, decoder, dataclasses.replace(config, options=options)


def prompt_texts() -> list[str]:
    """The texts of all files of prompts, in their order."""
    return [text for path in PROMPTS_FILE.value for text in read_prompts_file(path)]


def token_bar(label: str, prompts: int, config: DecodeConfig) -> "progress.tqdm":
    """A progress bar over tokens; texts that end early leave it short."""
    total = prompts * config.options.max_new_tokens
    return progress.bar(label=label, total=total, unit=" tokens")
