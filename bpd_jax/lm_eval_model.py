"""A model for evaluation harnesses: it scores and continues texts.

`HarnessModel` answers the requests of EleutherAI's Evaluation Harness and does not
import it; `bpd_jax.lm_eval` connects the two.
"""

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bpd_jax import api, progress
from bpd_jax.decoding.methods import parse_method
from bpd_jax.decoding.options import DecodeConfig, DecodeOptions
from bpd_jax.errors import UserError
from bpd_jax.evaluation.scoring import Score, score_texts
from bpd_jax.settings import check_value, integer

# A child of the harness's logger, so that its level applies here too.
_LOG = logging.getLogger("lm_eval.bpd_jax")

# Names that tasks use for the maximum number of tokens; the first one given counts.
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class Request(Protocol):
    """A request to a model; an `Instance` of the harness is one."""

    @property
    def args(self) -> tuple[Any, ...]:
        """A context and its continuation; a text; or a context and settings."""


class HarnessModel:
    """Scores texts and continues them.

    Attributes:
      lm: the model.
      max_length: tokens of its context.
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
        **assets: Any,
    ) -> None:
        """Loads a model.

        Args:
          model: a run folder, one of its checkpoints, or a known name; see `api.load`.
          method: as in `bpd_jax.decode --method=help`. It changes the speed, not the
            texts. By default `Decoder.default_method`.
          heads: folder of block heads for a pretrained model; None for its own.
          batch_size: texts read or decoded together.
          max_gen_toks: maximum length of a text in tokens, unless its task sets it.
          max_length: tokens of the context; by default the model's maximum.
          lattice_width: candidates per head, unless the method sets it.
          alpha: weight of the refiners, unless the method sets it.
          precision: dtype of activations and products; by default the model's own.
          seed: seed of the sampling noise.
          **assets: folders of the method's assets; see `api.load`.

        Raises:
          UserError: an argument is unknown or wrong, or something is missing.
        """
        super().__init__()
        for name in assets:
            if name not in api.ASSET_FOLDERS:
                names = ", ".join([*_ARGUMENTS, *api.ASSET_FOLDERS])
                raise UserError(f"unknown model argument {name!r}: give {names}.")
        if not model:
            raise UserError("the model argument 'model' is missing: give model=NAME.")
        if isinstance(batch_size, str) and batch_size.isdecimal():
            batch_size = int(batch_size)
        check_value("batch_size", batch_size, integer(1))
        check_value("max_gen_toks", max_gen_toks, integer(1))
        if method is not None:
            parse_method(method)  # Validates it before loading the model.
        self.lm = api.load(model, heads=heads, precision=precision, **assets)
        longest = self.lm.loaded.functions.config.trunk.max_length
        if max_length is not None:
            check_value("max_length", max_length, integer(2, longest))
        self.max_length = max_length or longest
        decoder = self.lm.decoder(lattice_width=lattice_width, alpha=alpha)
        self.method = method or decoder.default_method
        self.lattice_width, self.alpha = lattice_width, alpha
        self._defaults = DecodeOptions(
            max_new_tokens=max_gen_toks,
            batch_size=int(batch_size),
            seed=seed,
            end_of_text=self.lm.loaded.end_of_text,
        )
        parsed = parse_method(self.method)
        if parsed.kind != "auto":
            decoder.check(parsed, [], self._defaults)

    def keep(self, kind: str, arguments: tuple[Any, ...], answer: object) -> None:
        """Called with each answer as soon as it is computed; does nothing.

        Args:
          kind: kind of request: the name of the method that answers it.
          arguments: arguments of the request.
          answer: the answer of that method.
        """

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, which may be a rendered chat.

        Special tokens that are written out in the texts of a chat model are read as
        those tokens, as other tools do, so that results can be compared.
        """
        loaded = self.lm.loaded
        encode = loaded.tokenizer.encode
        ids = (
            encode(text) if loaded.chat is None else loaded.tokenizer.encode_chat(text)
        )
        begin = loaded.begin_of_text
        return ids if begin is None or ids[:1] == [begin] else [begin, *ids]

    def encode_pair(self, context: str, continuation: str) -> tuple[np.ndarray, int]:
        """Token ids of a text, and the number of those of its continuation.

        Spaces at the end of the context belong to the continuation, because tokens
        begin with spaces. Worked example: of `4 times 2 is ` and `8.` the
        context is `4 times 2 is` and the continuation ` 8.`

        If the context is empty and the model has no begin-of-text token, the text
        follows an end-of-text token.
        """
        bare = context.rstrip()
        full, context_ids = self.encode(context + continuation), self.encode(bare)
        # One token may span the end of the context and the beginning of the rest.
        least = 1 if len(bare) < len(context + continuation) else 0
        count = max(len(full) - len(context_ids), least)
        if count == len(full):
            full = [self.lm.loaded.tokenizer.end_of_text, *full]
        return np.asarray(full, np.int32), count

    def loglikelihood(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Scores each continuation given its context.

        Contexts that are too long are cut from the left.

        Args:
          requests: of a context and its continuation.
          disable_tqdm: whether there is no progress bar.

        Returns:
          The log-probability of each in nats, and whether it is the greedy
          continuation.
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

        Every token is predicted once, from as many before it as the windows of
        `scoring.windows` let the model read.

        Args:
          requests: of a text.
          disable_tqdm: whether there is no progress bar.

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
        scores = score_texts(
            self.lm.loaded.functions,
            self.lm.loaded.params,
            texts,
            batch_size=self._defaults.batch_size,
            max_length=self.max_length,
        )
        total = len(texts)
        return iter(
            progress.bar(
                scores, label="scoring", total=total, unit=" texts", disable=disable
            )
        )

    def generate_until(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[str]:
        """Continues each context.

        Contexts that leave no room for the continuation are cut from the left.

        Args:
          requests: of a context and the settings of its task; see `decode_options`.
          disable_tqdm: whether there is no progress bar.

        Returns:
          The continuations, each up to the first of its stop texts.

        Raises:
          UserError: a task requests something that decoding does not support.
        """
        # A call pads its prompts to one length and compiles for that length.
        groups: dict[tuple[DecodeOptions, int], dict[int, list[int]]]
        groups = defaultdict(dict)
        cut = 0
        for index, request in enumerate(requests):
            context, settings = request.args
            options = decode_options(settings, self._defaults)
            max_prompt = self.max_length - options.max_new_tokens
            if max_prompt < 1:
                raise UserError(
                    f"a task asks for up to {options.max_new_tokens} new tokens, but "
                    f"the model holds {self.max_length}, prompt included: give "
                    "--gen_kwargs max_gen_toks=NUMBER."
                )
            ids = self.encode(context) or [self.lm.loaded.tokenizer.end_of_text]
            cut += len(ids) > max_prompt
            ids = ids[-max_prompt:]
            groups[options, _length_class(len(ids))][index] = ids
        if cut:
            _LOG.warning("%d contexts are too long; their beginnings are cut.", cut)

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
                self.method,
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
            **{
                field.name: getattr(options, field.name)
                for field in dataclasses.fields(options)
            },
        )

    @property
    def tokenizer_name(self) -> str:
        """Distinguishes stored prompts of several models."""
        return self.lm.loaded.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The model's template, in Jinja, which the harness records.

        Raises:
          UserError: it has none, or another one is asked for.
        """
        chat = self.lm.loaded.chat
        if chat is None or isinstance(chat_template, str):
            has = "has no chat template" if chat is None else "has one chat template"
            say = "leave out" if chat is None else "give no name to"
            raise UserError(
                f"{self.lm.loaded.name} {has}: {say} --apply_chat_template."
            )
        return chat.template

    def apply_chat_template(
        self,
        chat_history: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation as text.

        Args:
          chat_history: messages, each with `role` and `content`.
          add_generation_prompt: whether the model answers; otherwise it continues the
            last message.
        """
        self.chat_template(True)
        chat = self.lm.loaded.chat
        assert chat is not None
        text = chat.render(chat_history, answer=add_generation_prompt)
        if not add_generation_prompt:
            # The template's text after the last words would end the message.
            last = chat_history[-1]["content"].strip()
            text = text[: text.rindex(last) + len(last)]
        return text


_ARGUMENTS = tuple(HarnessModel.__init__.__kwdefaults__ or {})


def _length_class(length: int) -> int:
    """Class of a prompt by length: 0 up to 128 tokens, 1 up to 512, 2 up to 2048, …"""
    return (((length - 1) // 128).bit_length() + 1) // 2


def decode_options(
    settings: Mapping[str, Any], defaults: DecodeOptions
) -> DecodeOptions:
    """The options that the `generation_kwargs` of a task ask for.

    Args:
      settings: `until`, one or several stop texts; `max_gen_toks` or a name that other
        programs have for it; `do_sample`, `temperature`, `top_p`, `top_k`, `seed`.
      defaults: options that they do not set.

    Raises:
      UserError: a setting is unknown, or its value is not allowed.
    """
    left = dict(settings)
    until = left.pop("until", None) or []
    stops = [until] if isinstance(until, str) else until
    limits = [left.pop(name, None) for name in _MOST_TOKENS]
    most = next((most for most in limits if most is not None), defaults.max_new_tokens)
    sample = left.pop("do_sample", None)
    temperature = left.pop("temperature", None)
    if sample is False:
        temperature = 0.0
    elif temperature is None:
        temperature = 1.0 if sample else 0.0
    top_k, top_p = left.pop("top_k", None), left.pop("top_p", None)
    seed = left.pop("seed", defaults.seed)
    # One beam is greedy decoding.
    if left.get("num_beams") == 1:
        del left["num_beams"]
    if left:
        raise UserError(
            f"a task sets {', '.join(left)}, which decoding does not support: it "
            f"takes until, {_MOST_TOKENS[0]}, do_sample, temperature, top_p, top_k and "
            "seed."
        )
    drawn: dict[str, Any] = {}
    # Greedy tasks may set options of sampling; top_k of 0 or -1 means all tokens.
    if temperature != 0:
        drawn["top_p"] = 1.0 if top_p is None else top_p
        drawn["top_k"] = None if top_k in (0, -1) else top_k
    return dataclasses.replace(
        defaults,
        stop=tuple(text for text in stops if text),
        max_new_tokens=most,
        temperature=temperature,
        seed=seed,
        **drawn,
    )
