"""GPT-2 in Hugging Face's layout."""

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
    layout: dict[Path, Origin] = {}

    def add(parameter: str, name: str, shape: tuple[int, ...], *to: int) -> None:
        path = tuple(parameter.split("."))
        layout[path] = Origin(prefix + name, shape, lambda x: x.reshape(to or shape))

    def add_norm(module: str, name: str) -> None:
        add(f"{module}.scale", f"{name}.weight", (width,))
        add(f"{module}.bias", f"{name}.bias", (width,))

    def add_third(part: int, parameter: str, name: str, *to: int) -> None:
        shape = (*to[:-2], 3 * width)

        def third(tensor: np.ndarray) -> np.ndarray:
            return np.split(tensor, 3, axis=-1)[part].reshape(to)

        layout[tuple(parameter.split("."))] = Origin(prefix + name, shape, third)

    add("embedding", "wte.weight", (config.vocab_size, width))
    add("position_embedding", "wpe.weight", (config.max_length, width))
    add_norm("final_norm", "ln_f")
    if not config.tied_softmax:
        layout["softmax",] = Origin("lm_head.weight", (config.vocab_size, width))
    split = (heads, config.head_width)
    for layer in range(config.num_layers):
        attention, mlp, block = f"attention_{layer}", f"mlp_{layer}", f"h.{layer}"
        add_norm(f"attention_norm_{layer}", f"{block}.ln_1")
        add_norm(f"mlp_norm_{layer}", f"{block}.ln_2")
        name = f"{block}.attn.c_attn"
        for part, module in enumerate(("query", "key", "value")):
            kernel, bias = f"{attention}.{module}.kernel", f"{attention}.{module}.bias"
            add_third(part, kernel, f"{name}.weight", width, *split)
            add_third(part, bias, f"{name}.bias", *split)
        name, square = f"{block}.attn.c_proj", (width, width)
        add(f"{attention}.output.kernel", f"{name}.weight", square, *split, width)
        add(f"{attention}.output.bias", f"{name}.bias", (width,))
        for module, name, shape in (
            ("input", "c_fc", (width, inner)),
            ("output", "c_proj", (inner, width)),
        ):
            add(f"{mlp}.{module}.kernel", f"{block}.mlp.{name}.weight", shape)
            add(f"{mlp}.{module}.bias", f"{block}.mlp.{name}.bias", shape[1:])
    return layout
