"""What the caller of the decode loop decides."""

import dataclasses
from typing import Annotated

from bpd_jax.errors import UserError
from bpd_jax.settings import (
    WORDS,
    Check,
    Count,
    NonNegative,
    Seed,
    Share,
    Validated,
    choice,
    each,
    integer,
    number,
)

EXACT, SPECULATIVE, TYPICAL = ACCEPTANCES = ("exact", "speculative", "typical")
TREE, BATCHED = VERIFICATIONS = ("tree", "batched")

# Logits divided by less may overflow float32.
_LEAST_TEMPERATURE = 1e-4
_TOKEN = integer(0)
_TOKENS = Check(
    "a token id, or a list of them",
    int,
    lambda value: _TOKEN.accepts(value) or each(_TOKEN).accepts(value),
    optional=True,
    convert=lambda value: tuple(value) if isinstance(value, list) else value,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(Validated):
    """What one serial call must know; hashable, hence jit-static.

    Attributes:
      temperature: 0 is greedy; above 0 the model samples.
      top_k: sample among the k best tokens; None for all.
      top_p: sample among the fewest best tokens that have this probability; 1 for all.
      acceptance: how draft tokens are accepted: exact and speculative are lossless,
        typical is not; see `DecodeOptions`.
      typical_epsilon, typical_delta: thresholds of typical acceptance.
      verification: how drafts are laid out in the forward pass; see `DecodeOptions`.
      end_of_text: a token that ends a row once it is decoded, or several of which each
        does; None for no such token.
      stride: the most tokens that one serial call adds to a text, or None. The history
        counts all that were accepted; with a stride of 1 it has an entry for every
        token (see `bpd_jax.decoding.replay`).
    """

    prefix = ""

    temperature: NonNegative = 0.0
    top_k: Count | None = None
    top_p: Annotated[float, number(above=0, most=1)] = 1.0
    acceptance: Annotated[str, choice(*ACCEPTANCES)] = EXACT
    typical_epsilon: Share = 0.3
    typical_delta: Share = 0.09
    verification: Annotated[str, choice(*VERIFICATIONS)] = TREE
    end_of_text: Annotated[int | tuple[int, ...] | None, _TOKENS] = None
    stride: Count | None = None

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a row."""
        ends = self.end_of_text
        return () if ends is None else (ends,) if isinstance(ends, int) else ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions(StepOptions):
    """How far and how tokens are chosen.

    Acceptance:
      exact: a draft token is kept if it is the one that the model chooses there,
        greedily or with noise that depends on seed, prompt and position alone. The
        text is the same for every method, token for token. Lossless.
      speculative: speculative sampling (Leviathan et al. 2023; for trees, the rule of
        SpecInfer without replacement): drafts are drawn, and accepted or replaced so
        that the text is distributed as the model's own. Lossless in distribution.
      typical: Medusa's rule: keeps what the model holds for likely enough. LOSSY.

    Verification:
      tree: drafts merged by common prefix, one row, tree attention.
      batched: every draft a chain of its own beside the others, over one shared cache
        (the paper's batch of p drafts). Same results, more nodes.

    Attributes:
      max_new_tokens: the most tokens decoded after each prompt.
      stop: text that ends a row once it is decoded; several may be given.
      seed: of the sampling noise, in 0 … 2³² - 1.
      batch_size: B, prompts decoded together.
    """

    max_new_tokens: Count = 64
    stop: Annotated[tuple[str, ...], each(WORDS)] = ()
    seed: Seed = 0
    batch_size: Count = 1

    def check_together(self) -> None:
        """Raises a `UserError` for sampling options of greedy decoding, and others."""
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise UserError(
                f"temperature must be 0, which is greedy, or at least "
                f"{_LEAST_TEMPERATURE:g}, not {self.temperature:g}."
            )
        for text in self.stop:
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise UserError(f"stop must be UTF-8 text, not {text!r}.")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise UserError(
                "top_k and top_p are for sampling: give a temperature above 0."
            )
        if self.acceptance != EXACT and self.temperature == 0:
            raise UserError(
                f"{self.acceptance} acceptance samples: give a temperature above 0, or "
                "use exact acceptance."
            )

    @property
    def step(self) -> StepOptions:
        """What the compiled code depends on."""
        names = (field.name for field in dataclasses.fields(StepOptions))
        return StepOptions(**{name: getattr(self, name) for name in names})

    @property
    def lossless(self) -> bool:
        """Whether the text is, or is distributed as, the model's own."""
        return self.acceptance != TYPICAL


@dataclasses.dataclass(frozen=True)
class DecodeConfig(Validated):
    """What the commands `decode`, `evaluate` and `tune` take from gin files.

    Attributes:
      options: how far and how tokens are chosen.
      method: how to draft; see `bpd_jax.decoding.methods`; None is
        `Decoder.default_method`.
      lattice_width: W, candidates per head (the paper's k) where a method names none.
      alpha: weight of the refiners where a method names none; trained refiners
        (markov, recurrent) keep the weight of 1 that they were trained with.
    """

    prefix = ""

    options: DecodeOptions = DecodeOptions()
    method: str | None = None
    lattice_width: Count = 16
    alpha: NonNegative = 1.0
