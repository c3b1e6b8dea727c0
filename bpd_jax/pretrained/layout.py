"""Where each of our parameters lies in a checkpoint of Hugging Face's layout.

Their matrices are [output, input], with heads folded into one axis; ours are
[input, …, output] with an axis per head.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from bpd_jax.models.config import TransformerConfig

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """One tensor of a checkpoint.

    Attributes:
      name: of the tensor.
      shape: as it is stored.
      convert: from that to our layout.
    """

    name: str
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray] = lambda tensor: tensor


def llama_layout(config: TransformerConfig) -> dict[Path, Origin]:
    """The tensors of Llama and its relatives, by the paths of our trunk's parameters.

    Mistral, SmolLM, Qwen2 (biases of queries, keys and values) and Qwen3 (norms of
    queries and keys) have the same names.
    """
    width, inner, head = config.d_model, config.d_ff, config.head_width
    found: dict[Path, Origin] = {
        ("embedding",): Origin("model.embed_tokens.weight", (config.vocab_size, width)),
        ("final_norm", "scale"): Origin("model.norm.weight", (width,)),
    }
    if not config.tied_softmax:
        found["softmax",] = Origin("lm_head.weight", (config.vocab_size, width))
    for layer in range(config.num_layers):
        place = f"model.layers.{layer}"

        def add(
            ours: str, name: str, shape: tuple[int, ...], convert: Callable
        ) -> None:
            found[tuple(ours.split("."))] = Origin(f"{place}.{name}", shape, convert)

        add(f"attention_norm_{layer}.scale", "input_layernorm.weight", (width,), _same)
        add(
            f"mlp_norm_{layer}.scale",
            "post_attention_layernorm.weight",
            (width,),
            _same,
        )
        for ours, theirs, heads in (
            ("query", "q", config.num_heads),
            ("key", "k", config.kv_heads),
            ("value", "v", config.kv_heads),
        ):
            split = (heads, head)
            mine = f"attention_{layer}.{ours}"
            name, shape = f"self_attn.{theirs}_proj", (heads * head, width)
            add(f"{mine}.kernel", f"{name}.weight", shape, _transposed(width, *split))
            if config.qkv_bias:
                add(f"{mine}.bias", f"{name}.bias", shape[:1], _reshaped(*split))
        if config.query_key_norm:
            for ours in ("query", "key"):
                name = f"self_attn.{ours[0]}_norm.weight"
                add(f"attention_{layer}.{ours}_norm.scale", name, (head,), _same)
        add(
            f"attention_{layer}.output.kernel",
            "self_attn.o_proj.weight",
            (width, config.num_heads * head),
            _transposed(config.num_heads, head, width),
        )
        for ours, theirs, shape in (
            ("input", "gate", (inner, width)),
            ("gate", "up", (inner, width)),
            ("output", "down", (width, inner)),
        ):
            name = f"mlp.{theirs}_proj.weight"
            add(f"mlp_{layer}.{ours}.kernel", name, shape, np.transpose)
    return found


def _same(tensor: np.ndarray) -> np.ndarray:
    return tensor


def _reshaped(*shape: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda tensor: tensor.reshape(shape)


def _transposed(*shape: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda tensor: tensor.T.reshape(shape)
