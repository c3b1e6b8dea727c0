"""A model for EleutherAI's Evaluation Harness, which scores and continues texts.

`HarnessModel` answers the requests of the harness without importing it;
`bpd_jax.lm_eval` connects the two.
"""

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax import api
from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import TRUTH, check_value, integer
from bpd_jax.decoding.loaded_model import Chat
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import AUTO
from bpd_jax.decoding.options import DecodeConfig, DecodeOptions
from bpd_jax.evaluation.scoring import Score, score_texts
from bpd_jax.models.mesh import MeshConfig

# A child of the harness's logger, so that its level applies here too.
_LOG = logging.getLogger("lm_eval.bpd_jax")

# Names in tasks for the maximum number of tokens, by decreasing precedence.
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


# An `Instance` of the harness: its `args` are a context and its continuation, a text,
# or a context and settings.
Request = Any


class HarnessModel:
    """Scores texts and continues them.

    Attributes:
      max_length: maximum number of tokens of the context.
      method: the decoding method.
      lattice_width, alpha: settings of the method, unless its name sets them.
    """

    def __init__(
        self,
        *,
        model: str = "",
        method: str | None = None,
        heads: str | None = None,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        lattice_width: int = DecodeConfig.lattice_width,
        alpha: float = DecodeConfig.alpha,
        precision: str | None = None,
        seed: int = 0,
        mesh: MeshConfig | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        **assets: Any,
    ) -> None:
        """Loads a model.

        Args:
          model: a run folder, one of its checkpoints, or a known name; see `api.load`.
          method: method as in `bpd_jax.decode --method=help`, which affects the speed
            but not the texts; by default `Decoder.default_method`.
          heads: folder of block heads for a pretrained model; None for its own.
          batch_size: number of texts scored or decoded together.
          max_gen_toks: maximum number of new tokens, unless a task sets it.
          max_length: maximum number of tokens of the context; by default the model's.
          lattice_width: candidates per head, unless the method sets it.
          alpha: weight of the refiners, unless the method sets it.
          precision: dtype of activations and products; by default the model's own.
          seed: seed of the sampling noise.
          mesh: the devices that score and decode; None for the first one.
          enable_thinking: variable of the chat template; None leaves it undefined.
          chat_template_args: further variables of the chat template.
          **assets: folders of the method's assets; see `api.load`.
        """
        super().__init__()
        for name in assets:
            if name not in api.ASSET_FOLDERS:
                names = ", ".join([*_ARGUMENTS, *api.ASSET_FOLDERS])
                raise UserError(f"unknown model argument {name!r}: give {names}.")
        if not model:
            raise UserError("the model argument 'model' is missing: give model=NAME.")
        if not isinstance(mesh, MeshConfig | None):
            raise UserError(
                "mesh is no model argument: give --gin.MeshConfig.model=4, for example."
            )
        if isinstance(batch_size, str) and batch_size.isdecimal():
            batch_size = int(batch_size)
        check_value("batch_size", batch_size, integer(1))
        check_value("max_gen_toks", max_gen_toks, integer(1))
        if method is not None:
            parse_method(method)  # Validates it before loading the model.
        if not isinstance(chat_template_args, Mapping | None):
            raise UserError(
                "chat_template_args must be a mapping such as "
                f"{{'enable_thinking': False}}, not {chat_template_args!r}."
            )
        template = dict(chat_template_args or {})
        if enable_thinking is not None:
            check_value("enable_thinking", enable_thinking, TRUTH)
            template["enable_thinking"] = enable_thinking
        self.lm = api.load(
            model,
            heads=heads,
            template=template,
            precision=precision,
            mesh=mesh,
            **assets,
        )
        longest = self.lm.config.trunk.max_length
        if max_length is not None:
            check_value("max_length", max_length, integer(2, longest))
        self.max_length = max_length or longest
        decoder = self.lm.decoder(lattice_width=lattice_width, alpha=alpha)
        self.method = decoder.default_method if method is None else parse_method(method)
        self.lattice_width, self.alpha = lattice_width, alpha
        self._defaults = DecodeOptions(
            max_new_tokens=max_gen_toks,
            batch_size=int(batch_size),
            seed=seed,
            **self.lm.option_defaults,
        )
        if self.method != AUTO:
            decoder.check(self.method, [], self._defaults)

    def keep(self, kind: str, arguments: tuple[Any, ...], answer: object) -> None:
        """Hook for each answer as soon as it is computed; does nothing by default."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, which may be a rendered chat.

        For a chat model, the names of special tokens in a text are encoded as these
        tokens, as in other tools, so that results are comparable.
        """
        tokenizer = self.lm.tokenizer
        encode = tokenizer.encode if self.lm.chat is None else tokenizer.encode_chat
        ids = encode(text)
        begin = self.lm.begin_of_text
        return ids if begin is None or ids[:1] == [begin] else [begin, *ids]

    def encode_pair(self, context: str, continuation: str) -> tuple[np.ndarray, int]:
        """Token ids of a text, and the number of tokens of its continuation.

        Spaces at the end of the context are moved to the continuation, because tokens
        begin with spaces. Worked example: for `4 times 2 is ` and `8.` the context is
        `4 times 2 is` and the continuation ` 8.`

        An empty context is the begin-of-text token if the tokenizer has one, even if
        texts do not begin with it, and otherwise the end-of-text token, as in the
        harness's own model of Hugging Face checkpoints.
        """
        bare = context.rstrip()
        full, context_ids = self.encode(context + continuation), self.encode(bare)
        # A token may span the end of the context and the beginning of the continuation.
        least = 1 if len(bare) < len(context + continuation) else 0
        count = max(len(full) - len(context_ids), least)
        if count == len(full):
            full = [self.lm.prefix_token, *full]
        return np.asarray(full, np.int32), count

    def loglikelihood(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Scores each continuation given its context.

        Contexts that are too long are truncated on the left.

        Returns:
          The log-probability of each continuation in nats, and whether it is that of
          greedy decoding.
        """
        texts = [self.encode_pair(*request.args) for request in requests]
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for index, score in self._scores(texts, disable_tqdm):
            scores[index] = (score.log_prob, score.is_greedy)
            self.keep("loglikelihood", requests[index].args, scores[index])
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[float]:
        """Scores each text.

        Every token is predicted once, with the context that its window contains; see
        `scoring.windows`.

        Returns:
          Log-probabilities in nats.
        """
        texts = [self.encode_pair("", *request.args) for request in requests]
        scores = [0.0] * len(requests)
        for index, score in self._scores(texts, disable_tqdm):
            scores[index] = score.log_prob
            self.keep("loglikelihood_rolling", requests[index].args, scores[index])
        return scores

    def _scores(
        self, texts: Sequence[tuple[np.ndarray, int]], disable: bool
    ) -> Iterator[tuple[int, Score]]:
        yield from progress.bar(
            score_texts(
                self.lm.model,
                texts,
                batch_size=self._defaults.batch_size,
                max_length=self.max_length,
            ),
            label="scoring",
            total=len(texts),
            unit=" texts",
            disable=disable,
        )

    def generate_until(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[str]:
        """Continues each context.

        Contexts that leave no room for the continuation are truncated on the left.

        Args:
          requests: requests with a context and the settings of its task; see
            `decode_options`.
          disable_tqdm: whether to disable the progress bar.

        Returns:
          The continuations, each up to its first stop text.
        """
        # The prompts of a group are padded to one length, for which code is compiled.
        groups = defaultdict[tuple[DecodeOptions, int], dict[int, list[int]]](dict)
        truncated = 0
        for index, request in enumerate(requests):
            context, settings = request.args
            options = decode_options(settings, self._defaults)
            max_prompt = self.max_length - options.max_new_tokens
            if max_prompt < 1:
                raise UserError(
                    f"a task requests up to {options.max_new_tokens} new tokens, but "
                    f"the model supports {self.max_length} including the prompt: give "
                    "--gen_kwargs max_gen_toks=NUMBER."
                )
            ids = self.encode(context) or [self.lm.prefix_token]
            truncated += len(ids) > max_prompt
            ids = ids[-max_prompt:]
            groups[options, _length_class(len(ids))][index] = ids
        if truncated:
            _LOG.warning("%d contexts are too long and truncated.", truncated)

        texts = [""] * len(requests)
        tokens = calls = 0
        with progress.bar(
            label="decoding", total=len(requests), unit=" texts", disable=disable_tqdm
        ) as bar:
            for (options, _), prompts in groups.items():
                completions = self._decode(list(prompts.values()), options, bar)
                for index, completion in zip(prompts, completions, strict=True):
                    texts[index] = completion.text
                    tokens += len(completion.generation.output_ids)
                    calls += completion.generation.serial_calls
                    if options.temperature == 0:
                        args = requests[index].args
                        self.keep("generate_until", args, completion.text)
        if calls:
            _LOG.info(
                "%s: %s tokens in %s serial calls, %.2f tokens per call",
                self.method.name,
                f"{tokens:,}",
                f"{calls:,}",
                tokens / calls,
            )
        return texts

    def _decode(
        self, prompts: Sequence[list[int]], options: DecodeOptions, bar: "progress.tqdm"
    ) -> list[api.Completion]:
        end = bar.n + len(prompts)
        return api.generate(
            self.lm,
            prompts,
            self.method,
            on_progress=lambda _: bar.update(min(options.batch_size, end - bar.n)),
            lattice_width=self.lattice_width,
            alpha=self.alpha,
            **vars(options),
        )

    @property
    def tokenizer_name(self) -> str:
        """Name that distinguishes cached prompts of several models."""
        return self.lm.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The model's Jinja template, which the harness records."""
        chat = self._chat
        if isinstance(chat_template, str):
            raise UserError(
                f"{self.tokenizer_name} has one chat template: give "
                "--apply_chat_template without a name."
            )
        return chat.template

    @property
    def _chat(self) -> Chat:
        if self.lm.chat is None:
            raise UserError(
                f"{self.tokenizer_name} has no chat template: leave out "
                "--apply_chat_template."
            )
        return self.lm.chat

    def apply_chat_template(
        self,
        chat_history: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders a conversation as text.

        Args:
          chat_history: messages, each with `role` and `content`.
          add_generation_prompt: whether the model answers; otherwise it continues the
            last message.
        """
        chat = self._chat
        if not chat_history:
            raise UserError("a task has an empty conversation: give it a message.")
        if add_generation_prompt:
            return chat.render(chat_history)
        return chat.render_continued(chat_history)


_ARGUMENTS = tuple(HarnessModel.__init__.__kwdefaults__ or {})


def _length_class(length: int) -> int:
    """Class of a prompt by length: 0 up to 128 tokens, 1 up to 512, 2 up to 2048, …"""
    return (((length - 1) // 128).bit_length() + 1) // 2


def decode_options(
    settings: Mapping[str, Any], defaults: DecodeOptions
) -> DecodeOptions:
    """Converts the `generation_kwargs` of a task to options.

    Args:
      settings: `until`, one or several stop texts; `max_gen_toks` or one of its
        synonyms; `do_sample`, `temperature`, `top_p`, `top_k`, `min_p`, `seed`,
        `repetition_penalty`, `no_repeat_ngram_size`.
      defaults: values of options that the task does not set.
    """
    remaining = dict(settings)
    until = remaining.pop("until", None) or []
    stops = [until] if isinstance(until, str) else until
    limits = [remaining.pop(name, None) for name in _MOST_TOKENS]
    most = next((most for most in limits if most is not None), defaults.max_new_tokens)
    sample = remaining.pop("do_sample", None)
    temperature = remaining.pop("temperature", None)
    if sample is False:
        temperature = 0.0
    elif temperature is None:
        temperature = 1.0 if sample else 0.0
    top_k, top_p = remaining.pop("top_k", None), remaining.pop("top_p", None)
    min_p = remaining.pop("min_p", None)
    adjustments = {
        name: remaining.pop(name)
        for name in ("repetition_penalty", "no_repeat_ngram_size")
        if name in remaining
    }
    seed = remaining.pop("seed", defaults.seed)
    # One beam is greedy decoding.
    if remaining.get("num_beams") == 1:
        del remaining["num_beams"]
    if remaining:
        raise UserError(
            f"a task sets {', '.join(remaining)}, which is not supported: supported "
            f"are until, {_MOST_TOKENS[0]}, do_sample, temperature, top_p, top_k, "
            "min_p, seed, repetition_penalty and no_repeat_ngram_size."
        )
    sampling: dict[str, Any] = {}
    # Greedy tasks may set options of sampling; top_k of 0 or -1 means all tokens.
    if temperature != 0:
        sampling["top_p"] = 1.0 if top_p is None else top_p
        sampling["top_k"] = None if top_k in (0, -1) else top_k
        sampling["min_p"] = 0.0 if min_p is None else min_p
    return dataclasses.replace(
        defaults,
        stop=tuple(text for text in stops if text),
        max_new_tokens=most,
        temperature=temperature,
        seed=seed,
        **adjustments,
        **sampling,
    )
