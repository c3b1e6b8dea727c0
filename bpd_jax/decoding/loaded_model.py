"""A model as people use it: parameters, tokenizer, chat template, folders, assets."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.decoding.chat import check_variables, render_chat, render_continued
from bpd_jax.decoding.decoder import Decoder, remembered
from bpd_jax.decoding.options import DecodeConfig
from bpd_jax.decoding.pretrained_checkpoint import Checkpoint
from bpd_jax.drafting.assets import Assets
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.decoding_parameters import prepared, stacked_layers
from bpd_jax.models.model import Model
from bpd_jax.models.transformer_config import TransformerConfig

if TYPE_CHECKING:
    # A pretrained model, which has no task, is loaded without the modules of tasks.
    from bpd_jax.data.example_task import DataTask

Message = Mapping[str, str]

# Raises a `UserError` if a model of these sizes is not to be loaded.
SizesCheck = Callable[[TransformerConfig], None]

# A text, token ids, or a conversation.
Prompt = str | Sequence[int] | np.ndarray | Sequence[Message]

# Names of runs with a result of the same name, and a file of every run folder.
_RESULTS = ("heads", "drafter", "refiners/markov")
_RUN_CONFIGURATION = "config.gin"


def is_conversation(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and any(isinstance(m, Mapping) for m in prompt)


@dataclasses.dataclass(frozen=True)
class Chat:
    """The chat template of a model.

    Attributes:
      template: a Jinja template.
      begin_of_text: text of the begin-of-text token, which templates may use even if
        other texts do not begin with it.
      end_of_text: text of the end-of-text token.
      variables: further variables of the template, such as `enable_thinking`.
      tool_template: the template of conversations with tools, if it is another one.
      special_texts: texts of special tokens by their names.
    """

    template: str
    begin_of_text: str = ""
    end_of_text: str = ""
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tool_template: str | None = None
    special_texts: Mapping[str, str | list[str]] = dataclasses.field(
        default_factory=dict
    )

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Chat | None":
        """The template of a checkpoint; None if it has none."""
        if checkpoint.chat_template is None:
            return None
        end = checkpoint.tokenizer.id_to_token(checkpoint.end_tokens[0]) or ""
        return cls(
            checkpoint.chat_template,
            checkpoint.begin_text,
            end,
            tool_template=checkpoint.tool_template,
            special_texts=checkpoint.special_texts,
        )

    def with_variables(self, variables: Mapping[str, Any]) -> "Chat":
        """The template with further variables, which must be among its own."""
        known = {**self.variables, **variables}
        changed = dataclasses.replace(self, variables=known)
        check_variables(changed._chosen, variables)
        return changed

    @property
    def _chosen(self) -> str:
        """The template of conversations with these variables."""
        tools = self.variables.get("tools") is not None
        return (self.tool_template if tools else None) or self.template

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True
    ) -> str:
        """Renders a conversation as text.

        Args:
          messages: messages with `role` and `content`.
          answer: whether to append the beginning of the model's answer.
        """
        return render_chat(
            self._chosen,
            messages,
            add_generation_prompt=answer,
            bos_token=self.begin_of_text,
            eos_token=self.end_of_text,
            special_texts=self.special_texts,
            variables=self.variables,
        )

    def render_continued(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Renders a conversation whose last message the model continues."""
        return render_continued(
            lambda messages: self.render(messages, answer=False), messages
        )


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model with its parameters, its tokenizer and the assets of its methods.

    Attributes:
      name: display name.
      folder: folder of its run, to which measurements and reports are written.
      end_tokens: tokens that end a text; the first one is the default.
      task: the task that it was trained on; None for a pretrained model.
      begin_of_text: the token at the beginning of every text, or None.
      begin_token: the begin-of-text token, even if texts do not begin with it; None if
        there is none.
      chat: its chat template; None for a model that only continues texts.
      generation: options of decoding that come with the model.
      asset_folders: folders that are searched for assets of drafting methods.
      accuracies: accuracies of its heads, measured in training; see `Assets`.
      heads_identity: `identity` of its heads if they were loaded separately; None if
        there are none or they are part of the run.
      trunk_identity: `fingerprint` of its parameters before their layout was changed;
        None to compute it.
      step: training step of its checkpoint; None for a pretrained model.
      assets: those of its drafting methods; see `asset_files.with_assets`.
    """

    name: str
    folder: pathlib.Path
    model: Model
    tokenizer: Tokenizer
    end_tokens: tuple[int, ...]
    task: "DataTask | None" = None
    begin_of_text: int | None = None
    begin_token: int | None = None
    chat: Chat | None = None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    asset_folders: tuple[pathlib.Path, ...] = ()
    accuracies: tuple[tuple[float, ...], ...] | None = None
    heads_identity: str | None = None
    trunk_identity: str | None = None
    step: int | None = None
    assets: Assets = dataclasses.field(default_factory=Assets)

    @property
    def config(self) -> BlockwiseConfig:
        """The sizes of the model."""
        return self.model.config

    @property
    def params(self) -> Params:
        """The parameters of the model."""
        return self.model.params

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies its trunk; see `attachments.fingerprint`."""
        return self.trunk_identity or fingerprint(self.config, self.params)

    @property
    def prefix_token(self) -> int:
        """The token after which a text without context begins: begin, or else end."""
        tokens = (self.begin_of_text, self.begin_token, self.end_tokens[0])
        return next(token for token in tokens if token is not None)

    @property
    def vocab_size(self) -> int:
        """V of the model, which may exceed the vocabulary of its tokenizer."""
        return self.config.trunk.vocab_size

    @property
    def end_of_text(self) -> int | tuple[int, ...]:
        """The end tokens as `DecodeOptions.end_of_text`."""
        return self.end_tokens[0] if len(self.end_tokens) == 1 else self.end_tokens

    @property
    def option_defaults(self) -> dict[str, Any]:
        """The options of decoding that come with the model, with its end tokens."""
        return {"end_of_text": self.end_of_text, **self.generation}

    def find_asset(self, name: str) -> pathlib.Path | None:
        """The first path `name` in the asset folders; None if there is none.

        A run that trains heads, a drafter or a refiner writes it to a folder in its own
        folder. If that has the same name, it is the result that is meant; a run that is
        not finished is passed over.
        """
        for folder in self.asset_folders:
            path = folder / name
            if name in _RESULTS and (path / _RUN_CONFIGURATION).exists():
                path /= path.name
            if path.exists():
                return path
        return None

    def for_decoding(
        self, precision: str | None = None, *, rounds: bool = False
    ) -> "LanguageModel":
        """Returns the model as its devices decode it; see `prepared`."""
        identity, mesh = self.fingerprint, self.model.mesh
        config, params, cache_dtype = prepared(
            self.config, self.params, mesh, precision, rounds=rounds
        )
        params["trunk"] = stacked_layers(params["trunk"], config.trunk, mesh)
        model = Model(config, params, cache_dtype, mesh)
        return dataclasses.replace(self, model=model, trunk_identity=identity)

    def decoder(
        self,
        *,
        lattice_width: int = DecodeConfig.lattice_width,
        alpha: float = DecodeConfig.alpha,
    ) -> Decoder:
        """Binds the model to its methods, once; see `Decoder`."""
        # Not a method of this object, which has the decoder.
        token_bytes = functools.partial(_token_bytes, self.tokenizer, self.vocab_size)
        make = functools.partial(
            Decoder,
            self.model,
            width=lattice_width,
            alpha=alpha,
            assets=self.assets,
            token_bytes=token_bytes,
        )
        return remembered(self._decoders, (lattice_width, alpha), make)

    @functools.cached_property
    def _decoders(self) -> dict[tuple[int, float], Decoder]:
        """The decoders, which keep what they have learned of times and acceptance."""
        return {}

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Token ids of a prompt (`encode_prompt`); token ids stay as they are."""
        if isinstance(prompt, str) or is_conversation(prompt):
            return self.encode_prompt(cast("str", prompt))
        try:
            ids = np.asarray(prompt)
        except ValueError as error:  # The lists have several lengths.
            words = "a prompt is not a list of token ids: give a text or integers."
            raise UserError(words) from error
        if not np.issubdtype(ids.dtype, np.integer):
            return ids  # Decoding refuses it.
        # Ids beyond int32 keep their value; decoding refuses them.
        narrow = ids.astype(np.int32)
        return narrow if np.array_equal(narrow, ids) else ids

    def encode_prompt(self, prompt: str | Sequence[Message]) -> np.ndarray:
        """Token ids of a prompt, int32.

        Args:
          prompt: a text, which is a user's message for a chat model and the beginning
            of a document otherwise; or a conversation of messages with `role` and
            `content`.
        """
        if self.chat is not None:
            if isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            ids = self.tokenizer.encode_chat(self.chat.render(prompt))
        elif isinstance(prompt, str):
            begin = [] if self.begin_of_text is None else [self.begin_of_text]
            ids = [*begin, *self.tokenizer.encode(prompt)]
        else:
            raise UserError(
                f"{self.name} has no chat template: give a text, not a conversation."
            )
        return np.asarray(ids, np.int32)

    def with_template(self, variables: Mapping[str, Any] | None) -> "LanguageModel":
        """Returns the model with further variables of its chat template."""
        if variables is None:
            return self
        if not isinstance(variables, Mapping):
            raise UserError(
                "variables of the chat template must be a mapping such as "
                f"{{'enable_thinking': False}}, not {variables!r}."
            )
        if not variables:
            return self
        if self.chat is None:
            raise UserError(
                f"{self.name} has no chat template: leave out its variables "
                f"({', '.join(map(str, variables))})."
            )
        return dataclasses.replace(self, chat=self.chat.with_variables(variables))

    def without_chat(self) -> "LanguageModel":
        """Returns the model without its chat template."""
        return dataclasses.replace(self, chat=None)


def _token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    return [tokenizer.piece_bytes(token) for token in range(vocab_size)]
