"""The records of studies, one JSON object per example.

The number of accepted tokens is stored for *every* position of a text, not only for
those where decoding calls the model. The calls of decoding, and thus block efficiency,
are derived from these numbers (`call_positions`); Table 5 needs all positions.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

TUNE, REPORT = PARTS = ("tune", "report")

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# Larger numbers are characters from this code point on.
_BEYOND = 0x100

ENTROPY_BIN = 0.5
"""Width of the bins of `DraftRecord.entropy_counts`, in nats."""

ENTROPY_STEP = 0.125
"""Resolution of `EntropyRecord.steps`, in nats."""


def to_digits(values: Sequence[int] | np.ndarray) -> str:
    """Encodes small numbers as one character each.

    >>> to_digits([1, 9, 10, 35, 36])
    '19azĤ'
    """
    return "".join(
        _DIGITS[value] if value < len(_DIGITS) else chr(_BEYOND + value)
        for value in values
    )


def from_digits(digits: str) -> np.ndarray:
    """Decodes the result of `to_digits`.

    >>> from_digits("19azĤ")
    array([ 1,  9, 10, 35, 36])
    """
    codes = np.frombuffer(digits.encode("utf-32-le"), np.uint32).astype(int)
    small = np.where(codes >= ord("a"), codes - ord("a") + 10, codes - ord("0"))
    return np.where(codes >= _BEYOND, codes - _BEYOND, small)


def call_positions(accepted: np.ndarray) -> np.ndarray:
    """The positions at which decoding calls the model.

    Worked example: at the positions 0 … 4 calls would yield 2, 1, 3, 2, 1 tokens.
    Decoding calls at 0, then at 0 + 2 = 2, and 2 + 3 = 5 is the end.

    >>> call_positions(np.array([2, 1, 3, 2, 1]))
    array([0, 2])

    Args:
      accepted: number of tokens that a call at each position yields, `[T]`, at least 1.
    """
    positions = []
    position = 0
    while position < len(accepted):
        positions.append(position)
        position += int(accepted[position])
    return np.array(positions, int)


@dataclasses.dataclass(frozen=True)
class Record:
    """A dataclass that is stored as a JSON object."""

    key_fields: ClassVar[tuple[str, ...]] = ("task", "example")

    @property
    def key(self) -> tuple[Any, ...]:
        """Identifies the record among those of its kind in a run."""
        return tuple(getattr(self, name) for name in self.key_fields)


@dataclasses.dataclass(frozen=True)
class DraftRecord(Record):
    """The drafts of one contender along one text, position by position.

    `accepted`, `length`, `equal` and `longest` have one digit (`from_digits`) per token
    of the text.

    Attributes:
      task: name of the task or category.
      example: index of the example in its task.
      part: `TUNE` or `REPORT`.
      contender: name of the contender, such as `ngram:16@general_2`.
      accepted: number of tokens that a serial call yields, 1 … L.
      length: number of tokens of the best-ranked draft.
      equal: number of equal neighbours in the best-ranked draft.
      longest: longest run of one token in the best-ranked draft.
      nodes: number of draft tokens verified, summed over the calls of decoding.
      head_entropy: mean entropy of heads 1 … L over all positions, in nats; only in
        records of `bpd`.
      entropy_counts: histogram of the entropy of heads 1 … L: for each head one digit
        per bin of `ENTROPY_BIN` nats, from 0 on, with its number of positions; as
        `head_entropy` only in records of `bpd`, and not in older ones.
    """

    key_fields = ("contender", "task", "example")

    task: str
    example: int
    part: str
    contender: str
    accepted: str
    length: str
    equal: str
    longest: str
    nodes: int
    head_entropy: list[float] = dataclasses.field(default_factory=list)
    entropy_counts: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        # With a yield of 0, `call_positions` would not terminate.
        if not self.accepted or "0" in self.accepted:
            raise ValueError("accepted has a position without a token")

    @property
    def yields(self) -> np.ndarray:
        """Number of tokens that a serial call yields at each position, `[T]`."""
        return from_digits(self.accepted)

    @property
    def repeats(self) -> np.ndarray:
        """Number of equal neighbours in the best draft at each position, `[T]`."""
        return from_digits(self.equal)

    @property
    def tokens(self) -> int:
        """Number of decoded tokens."""
        return len(self.accepted)

    @property
    def repetition(self) -> tuple[int, int, int, int]:
        """Equal neighbours, pairs, sum of longest runs, drafts of two tokens or more.

        Over all positions of the text.
        """
        length = from_digits(self.length)[: self.tokens]
        several = length > 1
        runs = from_digits(self.longest)[: self.tokens]
        equal = self.repeats[: self.tokens].sum()
        pairs = np.maximum(length - 1, 0).sum()
        return int(equal), int(pairs), int(runs[several].sum()), int(several.sum())

    @functools.cached_property
    def calls(self) -> int:
        """Number of serial calls of decoding."""
        return len(call_positions(self.yields))


@dataclasses.dataclass(frozen=True)
class EntropyRecord(Record):
    """The entropies of the heads that draft, at every position of one text.

    Attributes:
      task, example, part: as in `DraftRecord`.
      steps: for each of heads 2 … L one digit (`from_digits`) per token of the text,
        its entropy in steps of `ENTROPY_STEP` nats.
    """

    task: str
    example: int
    part: str
    steps: list[str]

    @property
    def entropies(self) -> np.ndarray:
        """Entropies of heads 2 … L in nats, `[L - 1, T]`."""
        return ENTROPY_STEP * np.array([*map(from_digits, self.steps)])


@dataclasses.dataclass(frozen=True)
class EngineRecord(Record):
    """The drafts of OpenFst against those of the exact search, along one text.

    Attributes:
      task, example, part: as in `DraftRecord`.
      contender: name of the contender with `engine=fst`.
      same: for each token of the text 1 if both engines propose the same best draft,
        verify as many draft tokens and have as many accepted, else 0.
      milliseconds, exact_milliseconds: time of drafting per call with either engine, on
        the device that replays the texts.
    """

    key_fields = ("contender", "task", "example")

    task: str
    example: int
    part: str
    contender: str
    same: str
    milliseconds: float
    exact_milliseconds: float


@dataclasses.dataclass(frozen=True)
class OracleRecord(Record):
    """Serial calls of the oracle on one text, for all widths and numbers of heads.

    Attributes:
      task, example, part: as in `DraftRecord`.
      tokens: number of decoded tokens.
      calls: number of serial calls, `[L - 1][K]`: row h - 2 is for heads 2 … h, column
        k - 1 for k candidates of each.
    """

    task: str
    example: int
    part: str
    tokens: int
    calls: list[list[int]]


@dataclasses.dataclass(frozen=True)
class QualityRecord(Record):
    """The quality of one text.

    Attributes:
      task, example, part: as in `DraftRecord`.
      prediction: the decoded text.
      references: correct answers; for a summary there is one.
      scores: scores by name: `exact_match`, `f1`, `rouge1`, `rouge2`, `rougeL` in
        0 … 1; `log_prob` in nats of `tokens` tokens, `last_word` 0 or 1, and
        `last_word_log_prob` of `last_word_tokens`.
    """

    task: str
    example: int
    part: str
    prediction: str
    references: list[str]
    scores: dict[str, float]


@dataclasses.dataclass(frozen=True)
class TimingRecord(Record):
    """The time of one prompt, decoded by one contender.

    Attributes:
      task, example: as in `DraftRecord`.
      contender: name of the contender; see `experiments/table_e/measurement.py`.
      temperature: temperature of sampling; 0 is greedy.
      round: index of the round.
      tokens, calls: number of decoded tokens and of serial calls.
      seconds: wall time, including prefill and excluding compilation.
      identical: whether the text equals that of plain decoding with the same noise;
        None for acceptance that only preserves the distribution.
    """

    key_fields = ("task", "contender", "temperature", "round", "example")

    task: str
    example: int
    contender: str
    temperature: float
    round: int
    tokens: int
    calls: int
    seconds: float
    identical: bool | None = None


@dataclasses.dataclass(frozen=True)
class LatencyRecord(Record):
    """The latency of the search in one lattice.

    Attributes:
      engine: engine of the search.
      steps, width, paths: number of heads, of candidates of each, and of drafts.
      milliseconds: one value per run.
    """

    key_fields = ("engine", "steps", "width", "paths")

    engine: str
    steps: int
    width: int
    paths: int
    milliseconds: list[float]


@dataclasses.dataclass(frozen=True)
class Call:
    """One serial call in the explorer.

    Attributes:
      at: position of the call in the text.
      draft: the best-ranked draft, as indices into `ExplorerRecord.pieces`.
      winner: the winning draft, in the same form.
      accepted: number of tokens that the call yielded.
      rank: rank of the winning draft; 0 is the best.
    """

    at: int
    draft: list[int]
    winner: list[int]
    accepted: int
    rank: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """The serial calls of one contender on the text of an `ExplorerRecord`."""

    contender: str
    label: str
    calls: list[Call]


@dataclasses.dataclass(frozen=True)
class ExplorerRecord(Record):
    """One text with all drafts along it, for the draft explorer.

    Attributes:
      task, example: as in `DraftRecord`.
      prompt: text of the prompt; the middle of a long one is removed.
      pieces: texts of the tokens that the other fields refer to by index.
      output: the decoded text, `[T]`.
      candidates: `[T][L - 1][k]`, candidates of heads 2 … L for the block that begins
        at each position, best first. The token of the position itself, from head 1, is
        certain.
      log_probs: log-probabilities of the candidates, in nats.
      traces: the serial calls of each contender.
    """

    task: str
    example: int
    prompt: str
    pieces: list[str]
    output: list[int]
    candidates: list[list[list[int]]]
    log_probs: list[list[list[float]]]
    traces: list[Trace]


RECORD_KINDS: dict[str, type[Record]] = {
    "draft": DraftRecord,
    "entropy": EntropyRecord,
    "engine": EngineRecord,
    "oracle": OracleRecord,
    "quality": QualityRecord,
    "timing": TimingRecord,
    "latency": LatencyRecord,
    "explorer": ExplorerRecord,
}
"""Record types by the value of the field `kind` in a file."""
