"""The location of each parameter in a checkpoint of Hugging Face's layout.

Their matrices are [output, input], with the heads folded into one axis; those of
bpd_jax are [input, …, output] with an axis for the heads.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.models.transformer_config import TransformerConfig

Path = tuple[str, ...]
Convert = Callable[[np.ndarray], np.ndarray]


def _same(tensor: np.ndarray) -> np.ndarray:
    return tensor


@dataclasses.dataclass(frozen=True)
class Origin:
    """The tensor of a checkpoint that contains a parameter.

    Attributes:
      name: name of the tensor; one tensor may contain several parameters.
      shape: shape of the stored tensor.
      convert: converts the stored tensor to the parameter; returns a view.
    """

    name: str
    shape: tuple[int, ...]
    convert: Convert = _same

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises a `UserError` unless this is the shape of the stored tensor."""
        if shape != self.shape:
            raise UserError(
                f"tensor {self.name} has shape {list(shape)}, but the configuration "
                f"requires {list(self.shape)}: the checkpoint is damaged, or belongs "
                "to another model than its configuration."
            )

    def stored(self, parameter: np.ndarray) -> np.ndarray:
        """The inverse of `convert`, for a tensor that is a single parameter."""
        tensor = np.empty(self.shape, parameter.dtype)
        view = self.convert(tensor)
        assert np.shares_memory(view, tensor)
        view[...] = parameter
        return tensor


def llama_layout(
    config: TransformerConfig, prefix: str = "model."
) -> dict[Path, Origin]:
    """The tensors of Llama and related models, by the paths of the trunk's parameters.

    Mistral, SmolLM, Qwen2 (with biases of queries, keys and values) and Qwen3 (with
    norms of queries and keys) use the same names.

    Args:
      config: configuration of the trunk.
      prefix: prefix of every name except the softmax; files of a model without its
        softmax have none.
    """
    table = (config.vocab_size, config.d_model)
    layout: dict[Path, Origin] = {
        ("embedding",): Origin(f"{prefix}embed_tokens.weight", table),
        ("final_norm", "scale"): Origin(f"{prefix}norm.weight", (config.d_model,)),
    }
    if not config.tied_softmax:
        layout["softmax",] = Origin("lm_head.weight", table)
    for layer in range(config.num_layers):
        layout.update(llama_layer(config, layer, prefix))
    return layout


def llama_layer(
    config: TransformerConfig, layer: int, prefix: str = "model."
) -> dict[Path, Origin]:
    """The tensors of one layer; see `llama_layout`."""
    width, head, heads = config.d_model, config.head_width, config.num_heads
    layout: dict[Path, Origin] = {}

    def add(
        parameter: str, name: str, shape: tuple[int, ...], convert: Convert
    ) -> None:
        path = tuple(parameter.format(layer).split("."))
        layout[path] = Origin(f"{prefix}layers.{layer}.{name}", shape, convert)

    def has_bias(choice: bool | None) -> bool:
        return config.use_bias if choice is None else choice

    for parameter, name in (
        ("attention", "input_layernorm"),
        ("mlp", "post_attention_layernorm"),
    ):
        add(parameter + "_norm_{}.scale", f"{name}.weight", (width,), _same)
    for parameter, name, count in (
        ("query", "q", heads),
        ("key", "k", config.kv_heads),
        ("value", "v", config.kv_heads),
    ):
        parameter, shape = f"attention_{{}}.{parameter}", (count * head, width)
        kernel, bias = _transposed(width, count, head), _reshaped(count, head)
        add(f"{parameter}.kernel", f"self_attn.{name}_proj.weight", shape, kernel)
        if has_bias(config.qkv_bias):
            add(f"{parameter}.bias", f"self_attn.{name}_proj.bias", shape[:1], bias)
        if config.query_key_norm and name != "v":
            add(
                f"{parameter}_norm.scale",
                f"self_attn.{name}_norm.weight",
                (head,),
                _same,
            )
    output = "attention_{}.output"
    kernel = _transposed(heads, head, width)
    add(f"{output}.kernel", "self_attn.o_proj.weight", (width, heads * head), kernel)
    if has_bias(config.output_bias):
        add(f"{output}.bias", "self_attn.o_proj.bias", (width,), _same)
    for parameter, name, shape in (
        ("input", "gate", (config.d_ff, width)),
        ("gate", "up", (config.d_ff, width)),
        ("output", "down", (width, config.d_ff)),
    ):
        parameter = f"mlp_{{}}.{parameter}"
        add(f"{parameter}.kernel", f"mlp.{name}_proj.weight", shape, np.transpose)
        if has_bias(config.mlp_bias):
            add(f"{parameter}.bias", f"mlp.{name}_proj.bias", shape[:1], _same)
    return layout


def _reshaped(*shape: int) -> Convert:
    return lambda tensor: tensor.reshape(shape)


def _transposed(*shape: int) -> Convert:
    return lambda tensor: tensor.T.reshape(shape)
