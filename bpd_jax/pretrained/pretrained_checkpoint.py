"""A language model that others trained, opened but not yet read."""

import dataclasses
from collections.abc import Mapping

import tokenizers

from bpd_jax.models.config import TransformerConfig
from bpd_jax.pretrained.llama_layout import Origin, Path
from bpd_jax.pretrained.load_parameters import Tensors


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """All that a checkpoint says of its model; `load_trunk` reads the parameters.

    Attributes:
      name: for people.
      config: of the trunk.
      layout: where each parameter lies, by its path in the trunk.
      tensors: to read them from.
      tokenizer: from text to ids and back.
      chat_template: in Jinja, of a conversation as text; None if there is none.
      begin_of_text: id that every text starts with; None if texts start bare.
      begin_text: the token that begins a text, as text: templates may write it even
        where texts start bare; empty if there is none.
      end_tokens: ids that end a text; the first is the one to write.
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
