"""Flags of commands that compare methods on prompts: `evaluate`, `tune`, benchmarks."""

import numpy as np
from absl import flags

from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.run_loading import held_out
from bpd_jax.evaluation import decode_flags

METHODS = flags.DEFINE_list("methods", [], "methods to compare with greedy decoding.")
NUM_PROMPTS = flags.DEFINE_integer(
    "num_prompts", 32, "number of held-out prompts, without --prompts_file."
)
PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "tokens of a prompt.")


def methods() -> list[Method]:
    """The methods of `--methods`."""
    return [parse_method(name) for name in METHODS.value if name.strip()]


def prompts(
    loaded: LanguageModel, least: int = 1
) -> tuple[list[np.ndarray], list[str]]:
    """The prompts of all `--prompts_file`s, or else `least` or more held-out ones.

    Returns:
      The prompts as tokens, and their texts; no texts for held-out prompts.
    """
    texts = decode_flags.prompt_texts()
    if texts:
        return [loaded.encode_prompt(text) for text in texts], texts
    count = max(NUM_PROMPTS.value, least)
    return held_out(loaded, count, PROMPT_TOKENS.value), texts
