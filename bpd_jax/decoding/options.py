"""What the caller of the decode loop decides."""

import dataclasses

from bpd_jax.errors import UserError

EXACT, SPECULATIVE, TYPICAL = ACCEPTANCES = ("exact", "speculative", "typical")
TREE, BATCHED = VERIFICATIONS = ("tree", "batched")


def check_whole_number(
    name: str, value: object, least: int = 1, below: float = float("inf")
) -> None:
    """Raises a `UserError` unless `value` is an int in `least` … `below` - 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name} is {value!r}: it must be a whole number.")
    if not least <= value < below:
        most = "or more" if below == float("inf") else f"… {below - 1}"
        raise UserError(f"{name} is {value}: it must be {least} {most}.")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UserError(f"{name} is {value!r}: it must be a number.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name} is {value!r}: choose from {', '.join(choices)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What one serial call must know; hashable, hence jit-static.

    Attributes:
      temperature: 0 is greedy; above 0 the model samples.
      top_k: sample among the k best tokens; None for all.
      top_p: sample among the fewest best tokens that have this probability; 1 for all.
      acceptance: how draft tokens are accepted; see `DecodeOptions`.
      typical_epsilon, typical_delta: thresholds of typical acceptance.
      verification: how drafts are laid out in the forward pass; see `DecodeOptions`.
      end_of_text: a token that ends a row once it is decoded, or several of which each
        does; None for no such token.
      stride: the most tokens that one serial call adds to a text, or None. The history
        counts all that were accepted; with a stride of 1 it has an entry for every
        token (see `bpd_jax.decoding.replay`).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    acceptance: str = EXACT
    typical_epsilon: float = 0.3
    typical_delta: float = 0.09
    verification: str = TREE
    end_of_text: int | tuple[int, ...] | None = None
    stride: int | None = None

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
      stop: texts that end a row once they are decoded.
      seed: of the sampling noise, in 0 … 2³² - 1.
      batch_size: B, prompts decoded together.
    """

    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    seed: int = 0
    batch_size: int = 1

    def __post_init__(self) -> None:
        check_whole_number("max_new_tokens", self.max_new_tokens)
        check_whole_number("batch_size", self.batch_size)
        check_whole_number("seed", self.seed, 0, 2**32)
        if self.stride is not None:
            check_whole_number("stride", self.stride)
        if self.top_k is not None:
            check_whole_number("top_k", self.top_k)
        if isinstance(self.end_of_text, list):
            object.__setattr__(self, "end_of_text", tuple(self.end_of_text))
        if self.end_of_text is not None and not isinstance(self.end_of_text, tuple):
            check_whole_number("end_of_text", self.end_of_text, 0)
        for token in self.end_tokens:
            check_whole_number("end_of_text", token, 0)
        for name in ("temperature", "top_p", "typical_epsilon", "typical_delta"):
            _check_number(name, getattr(self, name))
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature is {self.temperature}: it must be 0 (greedy) or above."
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must be above 0 and at most 1.")
        _check_choice("acceptance", self.acceptance, ACCEPTANCES)
        _check_choice("verification", self.verification, VERIFICATIONS)
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise UserError(
                "top_k and top_p are for sampling: give a temperature above 0."
            )
        if self.acceptance != EXACT and self.temperature == 0:
            raise UserError(
                f"{self.acceptance} acceptance samples: give a temperature above 0, or "
                "use exact acceptance."
            )
        for name in ("typical_epsilon", "typical_delta"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(
                    f"{name} is {getattr(self, name)}: it must be in 0 … 1."
                )
        if isinstance(self.stop, str):
            raise UserError(f"stop is one text, {self.stop!r}: give a tuple of texts.")
        if not isinstance(self.stop, (tuple, list)) or not all(
            isinstance(text, str) for text in self.stop
        ):
            raise UserError(f"stop is {self.stop!r}: give a tuple of texts.")
        object.__setattr__(self, "stop", tuple(self.stop))
        if not all(self.stop):
            raise UserError("a stop text is empty: give at least one character.")

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
class DecodeConfig:
    """What the commands `decode`, `evaluate` and `tune` take from gin files.

    Attributes:
      options: how far and how tokens are chosen.
      method: how to draft; see `bpd_jax.decoding.methods`. None is bpd, or
        prompt_lookup for a model without block heads.
      lattice_width: W, candidates per head (the paper's k) where a method names none.
      alpha: weight of the refiners where a method names none; trained refiners
        (markov, recurrent) keep the weight of 1 that they were trained with.
    """

    options: DecodeOptions = DecodeOptions()
    method: str | None = None
    lattice_width: int = 16
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.method is not None and not isinstance(self.method, str):
            raise UserError(
                f"method is {self.method!r}: give its name, as in ngram:16."
            )
        check_whole_number("lattice_width", self.lattice_width)
        _check_number("alpha", self.alpha)
