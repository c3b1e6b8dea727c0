"""The location of each parameter in a checkpoint of Hugging Face's layout.

Their matrices are [output, input], with the heads folded into one axis; those of
bpd_jax are [input, …, output] with an axis for the heads.
"""

import dataclasses
import math

import numpy as np

from bpd_jax.decoding.pretrained_checkpoint import Convert, Origin, Path
from bpd_jax.models.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Variant:
    """Where the tensors of a model differ from Llama's.

    Attributes:
      fused: whether queries, keys and values are one tensor, and gate and input of the
        feed-forward layer another (Phi-3).
      norm_offset: what is added to the weights of norms (Gemma).
      logit_divisor: divides the logits (Granite), through the weights of the last norm.
    """

    fused: bool = False
    norm_offset: float = 0.0
    logit_divisor: float = 1.0


# The norms of a layer before and after attention and the feed-forward layer, by
# `TransformerConfig.norm_place`.
_NORMS = {
    "before": {"attention": "input", "mlp": "post_attention"},
    "after": {
        "attention_output": "post_attention",
        "mlp_output": "post_feedforward",
    },
    "both": {
        "attention": "input",
        "attention_output": "post_attention",
        "mlp": "pre_feedforward",
        "mlp_output": "post_feedforward",
    },
}


def llama_layout(
    config: TransformerConfig, prefix: str = "model.", variant: Variant = Variant()
) -> dict[Path, Origin]:
    """The tensors of Llama and related models, by the paths of the trunk's parameters.

    Args:
      config: configuration of the trunk.
      prefix: prefix of every name except the softmax; some files have none.
      variant: where the tensors differ from Llama's.
    """
    table = (config.vocab_size, config.d_model)
    offset, divisor = variant.norm_offset, variant.logit_divisor

    def final(tensor: np.ndarray) -> np.ndarray:
        if not offset and divisor == 1:
            return tensor
        return (tensor.astype(np.float32) + np.float32(offset)) / np.float32(divisor)

    layout = {
        ("embedding",): Origin(f"{prefix}embed_tokens.weight", table),
        ("final_norm", "scale"): Origin(
            f"{prefix}norm.weight", (config.d_model,), final
        ),
    }
    if not config.tied_softmax:
        layout["softmax",] = Origin("lm_head.weight", table)
    for layer in range(config.num_layers):
        layout.update(llama_layer(config, layer, prefix, variant))
    return layout


def llama_layer(
    config: TransformerConfig,
    layer: int,
    prefix: str = "model.",
    variant: Variant = Variant(),
) -> dict[Path, Origin]:
    """The tensors of one layer; see `llama_layout`."""
    width, head, heads = config.d_model, config.head_width, config.num_heads
    layout: dict[Path, Origin] = {}

    def add(
        parameter: str, name: str, shape: tuple[int, ...], convert: Convert
    ) -> None:
        path = tuple(parameter.format(layer).split("."))
        layout[path] = Origin(f"{prefix}layers.{layer}.{name}", shape, convert)

    def add_norm(parameter: str, name: str, *shape: int) -> None:
        convert = _reshaped(*shape)
        if variant.norm_offset:
            convert = _added(variant.norm_offset)
        add(parameter + ".scale", f"{name}.weight", (math.prod(shape),), convert)

    def has_bias(choice: bool | None) -> bool:
        return config.use_bias if choice is None else choice

    for parameter, name in _NORMS[config.norm_place].items():
        add_norm(parameter + "_norm_{}", f"{name}_layernorm", width)
    joint = (heads + 2 * config.kv_heads) * head
    begin = 0
    for parameter, name, count in (
        ("query", "q", heads),
        ("key", "k", config.kv_heads),
        ("value", "v", config.kv_heads),
    ):
        parameter, size = f"attention_{{}}.{parameter}", count * head
        kernel, bias = _transposed(width, count, head), _reshaped(count, head)
        rows = size
        if variant.fused:
            kernel = _part(begin, begin + size, kernel)
            bias = _part(begin, begin + size, bias)
            name, rows = "qkv", joint
        begin += size
        tensor = f"self_attn.{name}_proj"
        add(f"{parameter}.kernel", f"{tensor}.weight", (rows, width), kernel)
        if has_bias(config.qkv_bias):
            add(f"{parameter}.bias", f"{tensor}.bias", (rows,), bias)
        if config.query_key_norm and not parameter.endswith("value"):
            shape = (count, head) if config.joint_query_key_norm else (head,)
            add_norm(f"{parameter}_norm", f"self_attn.{name}_norm", *shape)
    output = "attention_{}.output"
    kernel = _transposed(heads, head, width)
    add(f"{output}.kernel", "self_attn.o_proj.weight", (width, heads * head), kernel)
    if has_bias(config.output_bias):
        add(f"{output}.bias", "self_attn.o_proj.bias", (width,), _same)
    inner = config.d_ff
    if config.experts is not None:
        return layout | _experts(config, f"{prefix}layers.{layer}.mlp.", layer)
    for parameter, name, shape, begin in (
        ("input", "gate", (inner, width), 0),
        ("gate", "up", (inner, width), inner),
        ("output", "down", (width, inner), 0),
    ):
        parameter = f"mlp_{{}}.{parameter}"
        kernel, bias = np.transpose, _same
        if variant.fused and name != "down":
            kernel = _part(begin, begin + inner, kernel)
            bias = _part(begin, begin + inner, bias)
            name, shape = "gate_up", (2 * inner, width)
        add(f"{parameter}.kernel", f"mlp.{name}_proj.weight", shape, kernel)
        if has_bias(config.mlp_bias):
            add(f"{parameter}.bias", f"mlp.{name}_proj.bias", shape[:1], bias)
    return layout


def _experts(config: TransformerConfig, prefix: str, layer: int) -> dict[Path, Origin]:
    """The tensors of the router and the experts of one layer (Qwen3-MoE)."""
    width, inner, count = config.d_model, config.d_ff, config.experts
    assert count is not None
    layout: dict[Path, Origin] = {
        (f"mlp_{layer}", "router", "kernel"): Origin(
            f"{prefix}gate.weight", (count, width), np.transpose
        )
    }
    for parameter, name, shape in (
        ("input", "gate", (inner, width)),
        ("gate", "up", (inner, width)),
        ("output", "down", (width, inner)),
    ):
        layout[f"mlp_{layer}", f"{parameter}_experts"] = Origin(
            f"{prefix}experts.{{}}.{name}_proj.weight",
            shape,
            lambda tensor: tensor.swapaxes(1, 2),
            count,
        )
    return layout


def _same(tensor: np.ndarray) -> np.ndarray:
    return tensor


def _part(begin: int, end: int, convert: Convert) -> Convert:
    return lambda tensor: convert(tensor[begin:end])


def _added(offset: float) -> Convert:
    # In float32: 1 + w has no room for the digits of a small w in bfloat16.
    return lambda tensor: tensor.astype(np.float32) + np.float32(offset)


def _reshaped(*shape: int) -> Convert:
    return lambda tensor: tensor.reshape(shape)


def _transposed(*shape: int) -> Convert:
    return lambda tensor: tensor.T.reshape(shape)


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
