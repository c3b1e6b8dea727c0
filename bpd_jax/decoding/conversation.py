"""Conversations as the text that a model was taught to read."""

import dataclasses
from collections.abc import Mapping, Sequence

from bpd_jax.pretrained.chat import render_chat
from bpd_jax.pretrained.pretrained_checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class Chat:
    """A model's chat template.

    Attributes:
      template: in Jinja.
      begin_of_text: the text of that token, which templates may write even where
        other texts start bare.
      end_of_text: likewise.
    """

    template: str
    begin_of_text: str = ""
    end_of_text: str = ""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Chat | None":
        """The template of a checkpoint, if it has one."""
        if checkpoint.chat_template is None:
            return None
        end = checkpoint.tokenizer.id_to_token(checkpoint.end_tokens[0]) or ""
        return cls(checkpoint.chat_template, checkpoint.begin_text, end)

    def render(
        self, messages: Sequence[Mapping[str, str]], *, answer: bool = True
    ) -> str:
        """The conversation as text.

        Args:
          messages: each with `role` and `content`.
          answer: whether the text ends where the model is to answer.

        Raises:
          UserError: the template refuses the conversation, or is broken.
        """
        return render_chat(
            self.template,
            messages,
            add_generation_prompt=answer,
            bos_token=self.begin_of_text,
            eos_token=self.end_of_text,
        )
