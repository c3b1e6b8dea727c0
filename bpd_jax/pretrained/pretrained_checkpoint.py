"""A pretrained checkpoint that has been opened; its tensors are not read yet."""

import dataclasses
from collections.abc import Mapping

import tokenizers

from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.pretrained.llama_layout import Origin, Path
from bpd_jax.pretrained.load_parameters import Tensors


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """The contents of a checkpoint; `load_trunk` reads its parameters.

    Attributes:
      name: display name.
      config: configuration of the trunk.
      layout: location of each parameter, by its path in the trunk.
      tensors: the tensors of the checkpoint.
      tokenizer: from text to ids and back.
      chat_template: Jinja template of conversations; None if there is none.
      begin_of_text: id that every text starts with; None if there is none.
      begin_text: the begin-of-text token as text, which templates may write even if
        texts do not start with it; empty if there is none.
      end_tokens: ids that end a text; the first one is written.
    """

    name: str
    config: TransformerConfig
    layout: Mapping[Path, Origin]
    tensors: Tensors
    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    begin_of_text: int | None
    begin_text: str
    end_tokens: tuple[int, ...]
