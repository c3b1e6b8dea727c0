"""Options of decoding."""

import dataclasses
from typing import Annotated, Any, Self

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import (
    WORDS,
    Check,
    Count,
    Natural,
    NonNegative,
    Seed,
    Share,
    Validated,
    choice,
    configurable,
    each,
    integer,
    number,
)
from bpd_jax.models.mesh import MeshConfig

EXACT, SPECULATIVE, TYPICAL = ACCEPTANCES = ("exact", "speculative", "typical")
TREE, BATCHED = VERIFICATIONS = ("tree", "batched")

# Options that adjust the model's logits; None for no effect.
ADJUSTMENTS = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "min_length",
    "min_new_tokens",
)

# Logits divided by less may overflow float32.
_LEAST_TEMPERATURE = 1e-4
_TOKEN = integer(0)
_ID_TUPLE = each(_TOKEN)
_WORD_LISTS = Check(
    "a list of lists of token ids",
    _ID_TUPLE.parse,
    lambda value: isinstance(value, tuple) and all(map(_ID_TUPLE.accepts, value)),
    convert=lambda value: tuple(map(tuple, value)),
    optional=True,
)
_TOKENS = Check(
    "a token id, or a list of them",
    int,
    lambda value: _TOKEN.accepts(value) or each(_TOKEN).accepts(value),
    optional=True,
    convert=lambda value: tuple(value) if isinstance(value, list) else value,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(Validated):
    """Options of a serial call; hashable, and static under `jit`.

    Attributes:
      temperature: 0 is greedy decoding; above 0 tokens are sampled.
      top_k: sample among the k most probable tokens; None for all.
      top_p: sample among the fewest most probable tokens whose probabilities sum to at
        least this; 1 for all.
      min_p: sample among the tokens whose probability is at least this share of the
        highest one; 0 for all.
      repetition_penalty: divides the positive logits of tokens of the prompt and the
        text so far, and multiplies the negative ones; 1 for none. Default of this and
        the following options: what the model's generation_config.json sets, or no
        effect.
      no_repeat_ngram_size: no n-gram of this length occurs twice; 0 for no limit.
      bad_words_ids: sequences of tokens that are not completed.
      suppress_tokens: tokens that are never chosen.
      begin_suppress_tokens: tokens that are not the first of an answer.
      min_length: least length of a text, with the prompt, that ends by an end token.
      min_new_tokens: the same without the prompt.
      draft_noise: with a temperature and exact acceptance, weight of the random
        numbers of the model's choice in the predictions of heads and block drafters; 0
        to draft without them. Texts do not depend on it.
      acceptance: how draft tokens are accepted: exact and speculative are lossless,
        typical is not; see `DecodeOptions`.
      typical_epsilon, typical_delta: thresholds of typical acceptance.
      verification: how drafts are laid out in the forward pass; see `DecodeOptions`.
      end_of_text: the token that ends a text, or several such tokens; () for none, None
        for those of the model, which `bpd_jax.generate` and the commands fill in.
      stride: highest number of tokens that one serial call adds to a text; None for no
        limit. The history counts all accepted tokens; with a stride of 1 it has an
        entry for every token (see `bpd_jax.decoding.replay`).
    """

    prefix = ""

    temperature: NonNegative = 0.0
    top_k: Count | None = None
    top_p: Annotated[float, number(above=0, most=1)] = 1.0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, number(above=0)] | None = None
    no_repeat_ngram_size: Natural | None = None
    bad_words_ids: Annotated[tuple[tuple[int, ...], ...] | None, _WORD_LISTS] = None
    suppress_tokens: Annotated[tuple[int, ...], _ID_TUPLE] | None = None
    begin_suppress_tokens: Annotated[tuple[int, ...], _ID_TUPLE] | None = None
    min_length: Natural | None = None
    min_new_tokens: Natural | None = None
    draft_noise: NonNegative = 1.0
    acceptance: Annotated[str, choice(*ACCEPTANCES)] = EXACT
    typical_epsilon: Share = 0.3
    typical_delta: Share = 0.09
    verification: Annotated[str, choice(*VERIFICATIONS)] = TREE
    end_of_text: Annotated[int | tuple[int, ...] | None, _TOKENS] = ()
    stride: Count | None = None

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a row."""
        if self.end_of_text is None:
            raise UserError("end_of_text must be given here: tokens, or () for none.")
        ends = self.end_of_text
        return (ends,) if isinstance(ends, int) else ends

    @property
    def penalty(self) -> float:
        """The repetition penalty; 1 for none."""
        return 1.0 if self.repetition_penalty is None else self.repetition_penalty

    @property
    def adjusts(self) -> bool:
        """Whether the logits of the model are adjusted; see `decoding.sampling`."""
        return self.penalty != 1 or any(getattr(self, name) for name in ADJUSTMENTS[1:])

    @property
    def couples_drafts(self) -> bool:
        """Whether drafts use the random numbers of the model's choice."""
        samples = self.temperature > 0 and self.acceptance == EXACT
        return samples and self.draft_noise > 0

    def without_adjustments(self) -> Self:
        """The options of a model whose logits are adjusted already."""
        none: dict[str, Any] = dict.fromkeys(ADJUSTMENTS)
        return dataclasses.replace(self, **none)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions(StepOptions):
    """Options of decoding: lengths, sampling, acceptance and verification.

    Acceptance:
      exact: a draft token is accepted if it is the token that the model chooses at this
        position, greedily or with random numbers that depend only on seed, prompt and
        position. All methods decode the same text, token for token. Lossless.
      speculative: speculative sampling (Leviathan et al. 2023; for trees, the rule of
        SpecInfer without replacement): drafts are sampled, and accepted or replaced
        such that the text has the distribution of the model. Lossless in distribution.
      typical: Medusa's rule: accepts tokens that are probable enough. LOSSY.

    Verification:
      tree: drafts are merged by common prefix and verified with tree attention.
      batched: every draft is a separate chain over the shared cache (the paper's batch
        of p drafts). Same results, more nodes.

    Attributes:
      max_new_tokens: highest number of tokens decoded after each prompt.
      stop: a text that ends decoding when it appears; may be repeated.
      seed: seed of sampling, in 0 … 2³² - 1.
      batch_size: B, number of prompts decoded together.
    """

    max_new_tokens: Count = 64
    stop: Annotated[tuple[str, ...], each(WORDS)] = ()
    seed: Seed = 0
    batch_size: Count = 1

    def check_together(self) -> None:
        """Refuses incompatible options and invalid stop texts."""
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise UserError(
                f"temperature must be 0, which is greedy, or at least "
                f"{_LEAST_TEMPERATURE:g}, not {self.temperature:g}."
            )
        for text in self.stop:
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise UserError(f"stop must be UTF-8 text, not {text!r}.")
        if self.temperature == 0 and (
            self.top_k is not None or self.top_p < 1 or self.min_p > 0
        ):
            raise UserError(
                "top_k, top_p and min_p need sampling: give a temperature above 0."
            )
        if self.acceptance != EXACT and self.temperature == 0:
            raise UserError(
                f"{self.acceptance} acceptance needs sampling: give a temperature "
                "above 0, or use exact acceptance."
            )
        if self.acceptance != EXACT and self.stride is not None:
            raise UserError(
                f"{self.acceptance} acceptance cannot be combined with stride, because "
                "it chooses a token after the last accepted one only."
            )

    @property
    def step(self) -> StepOptions:
        """The options that compiled code depends on."""
        names = (field.name for field in dataclasses.fields(StepOptions))
        return StepOptions(**{name: getattr(self, name) for name in names})

    @property
    def lossless(self) -> bool:
        """Whether the text, or its distribution, is that of the model."""
        return self.acceptance != TYPICAL


# What commands that decode bind before their gin files.
GIN_DEFAULTS = (
    "DecodeConfig.options = @DecodeOptions()",
    "DecodeConfig.mesh = @MeshConfig()",
    "DecodeOptions.end_of_text = None",
)


@configurable
@dataclasses.dataclass(frozen=True)
class DecodeConfig(Validated):
    """Configuration of the commands `decode`, `evaluate` and `tune` in gin files.

    Attributes:
      options: options of decoding.
      method: the drafting method; see `bpd_jax.decoding.method_text`. None is
        `Decoder.default_method`.
      lattice_width: W, candidates per head (the paper's k) for methods without k.
      alpha: weight of the refiners for methods without alpha; the default weight of
        the trained refiner markov is 1, with which it was trained.
      mesh: the devices that decode; None for the first one.
    """

    prefix = ""

    options: DecodeOptions = DecodeOptions()
    method: str | None = None
    lattice_width: Count = 16
    alpha: NonNegative = 1.0
    mesh: MeshConfig | None = None
