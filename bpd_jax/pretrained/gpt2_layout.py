"""GPT-2 in Hugging Face's layout."""

from collections.abc import Callable

import numpy as np

from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.pretrained.llama_layout import Origin, Path


def gpt2_layout(
    config: TransformerConfig, prefix: str = "transformer."
) -> dict[Path, Origin]:
    """The tensors of GPT-2, by the paths of the trunk's parameters.

    Its matrices are [input, output], unlike those of other families. Queries, keys and
    values are concatenated in one tensor.

    Args:
      config: configuration of the trunk.
      prefix: prefix of every name except the softmax; the first files had none.
    """
    width, inner, heads = config.d_model, config.d_ff, config.num_heads
    found: dict[Path, Origin] = {}

    def add(ours: str, name: str, shape: tuple[int, ...], *to: int) -> None:
        path = tuple(ours.split("."))
        found[path] = Origin(prefix + name, shape, _reshaped(to or shape))

    def add_norm(ours: str, name: str) -> None:
        add(f"{ours}.scale", f"{name}.weight", (width,))
        add(f"{ours}.bias", f"{name}.bias", (width,))

    def add_third(part: int, ours: str, name: str, *to: int) -> None:
        shape = (*to[:-2], 3 * width)
        origin = Origin(prefix + name, shape, _third(part, to))
        found[tuple(ours.split("."))] = origin

    add("embedding", "wte.weight", (config.vocab_size, width))
    add("position_embedding", "wpe.weight", (config.max_length, width))
    add_norm("final_norm", "ln_f")
    if not config.tied_softmax:
        found["softmax",] = Origin("lm_head.weight", (config.vocab_size, width))
    split = (heads, config.head_width)
    for layer in range(config.num_layers):
        attention, mlp, place = f"attention_{layer}", f"mlp_{layer}", f"h.{layer}"
        add_norm(f"attention_norm_{layer}", f"{place}.ln_1")
        add_norm(f"mlp_norm_{layer}", f"{place}.ln_2")
        name = f"{place}.attn.c_attn"
        for part, ours in enumerate(("query", "key", "value")):
            add_third(
                part, f"{attention}.{ours}.kernel", f"{name}.weight", width, *split
            )
            add_third(part, f"{attention}.{ours}.bias", f"{name}.bias", *split)
        name, square = f"{place}.attn.c_proj", (width, width)
        add(f"{attention}.output.kernel", f"{name}.weight", square, *split, width)
        add(f"{attention}.output.bias", f"{name}.bias", (width,))
        for ours, theirs, shape in (
            ("input", "c_fc", (width, inner)),
            ("output", "c_proj", (inner, width)),
        ):
            add(f"{mlp}.{ours}.kernel", f"{place}.mlp.{theirs}.weight", shape)
            add(f"{mlp}.{ours}.bias", f"{place}.mlp.{theirs}.bias", shape[1:])
    return found


def _reshaped(shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda tensor: tensor.reshape(shape)


def _third(part: int, shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda tensor: np.split(tensor, 3, axis=-1)[part].reshape(shape)
