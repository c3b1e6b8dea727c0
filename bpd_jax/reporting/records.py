"""The records of a report: dataclasses of JSON values, without models or arrays."""

import dataclasses
from typing import Any, Literal

Facts = dict[str, Any]
"""Named values to show unchanged: strings, numbers, booleans, lists, None."""


GREEDY_NAME = "greedy"
"""`MethodSummary.name` of the reference for the outputs of all methods."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One serial call: the winning draft and its number of accepted tokens.

    Example: `Step(["def", " add", "(x"], accepted=2)` emitted `def add`; the model's
    next token is not `(x`.

    Attributes:
      draft: texts of the draft's tokens, at most L; the first one is certain, because
        it is the model's own next token.
      accepted: number of leading tokens that were accepted, 1 to len(draft).
      rank: rank of the winning draft among the P drafts; 0 has the best score.
    """

    draft: list[str]
    accepted: int
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class DecodeRecord:
    """One prompt decoded by one method.

    Attributes:
      method: `MethodSummary.name` of the method.
      prompt_index: the same prompt has the same index for every method.
      prompt, text: prompt and decoded text.
      input_ids, output_ids: their token ids.
      serial_calls: model calls of the decode loop, without prefill.
      block_efficiency: decoded tokens / serial calls.
      seconds: wall time.
      steps: one entry per serial call.
    """

    method: str
    prompt_index: int
    prompt: str
    text: str
    input_ids: list[int]
    output_ids: list[int]
    serial_calls: int
    block_efficiency: float
    seconds: float
    steps: list[Step]


@dataclasses.dataclass(frozen=True)
class MethodSummary:
    """One method over all prompts.

    Attributes:
      name: short key, as in `DecodeRecord.method`.
      label: display name, for example "16-best 4-gram".
      block_efficiency: decoded tokens / serial calls, over all prompts.
      serial_calls, tokens: number of serial calls and of decoded tokens.
      seconds: wall time over all prompts; the median over several rounds.
      speedup: median over rounds of greedy decoding's seconds divided by the method's;
        None if nothing was timed.
      gain: block efficiency divided by that of BPD, minus one; None for greedy decoding
        and BPD.
      differing: number of prompts whose output differs from that of greedy decoding.
      near_ties: number of these prompts whose first difference is a near-tie: both
        tokens are the most probable one, up to rounding.
      interval: bootstrap interval (low, high) of the block efficiency.
      gain_interval: paired bootstrap interval (low, high) of `gain`.
      divergence: see `decoding.compare.divergence`; None if no text differs.
      nodes: mean number of distinct prefixes verified per serial call.
      repeated: share of equal neighbours in the best-ranked drafts.
      longest_run: mean longest run of one token in them.
      entropies: mean entropy of heads 2 … L in nats.
      accepted: share of the serial calls that accept 1, 2, … L tokens.
      upper_bound: whether the method uses the text itself (the oracle), so that no
        method is better with the same lattice; it is never named as the best method.
      note: a short note on the label.
      automatic: whether `auto` chose this method.
    """

    name: str
    label: str
    block_efficiency: float
    serial_calls: int
    tokens: int
    seconds: float
    gain: float | None = None
    differing: int = 0
    near_ties: int = 0
    interval: tuple[float, float] | None = None
    gain_interval: tuple[float, float] | None = None
    divergence: dict[str, float] | None = None
    nodes: float | None = None
    repeated: float | None = None
    longest_run: float | None = None
    entropies: list[float] = dataclasses.field(default_factory=list)
    accepted: list[float] = dataclasses.field(default_factory=list)
    upper_bound: bool = False
    note: str = ""
    speedup: float | None = None
    automatic: bool = False

    @property
    def agreement(self) -> Literal["identical", "near-tie", "different"]:
        """The agreement of the outputs with those of greedy decoding."""
        if not self.differing:
            return "identical"
        return "near-tie" if self.differing == self.near_ties else "different"

    @property
    def verdict(self) -> str:
        """The agreement, with the number of texts that differ."""
        if self.name == GREEDY_NAME:
            return "reference"
        if self.agreement == "identical":
            return "identical ✓"
        if self.agreement == "different":
            return f"{self.differing - self.near_ties} DIFFERENT"
        return f"{self.near_ties} near-tie" + "s" * (self.near_ties > 1)

    @property
    def marked_label(self) -> str:
        """The label, marked if `auto` chose the method."""
        return f"{self.label} ← auto" if self.automatic else self.label


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One token of a lattice position, with its natural log-probability."""

    piece: str
    log_prob: float


@dataclasses.dataclass(frozen=True)
class Path:
    """A path through the lattice: one candidate index per position.

    Attributes:
      label: display name, for example "BPD".
      candidates: index into `LatticePicture.positions[i]` for i = 0, 1, …
      accepted: number of leading tokens that the model accepts, 1 to all of them.
    """

    label: str
    candidates: list[int]
    accepted: int


@dataclasses.dataclass(frozen=True)
class LatticePicture:
    """The lattice of one serial call, with the drafts taken from it.

    Attributes:
      prompt_tail: the end of the text before the block.
      positions: L lists of candidates, best first; position 0 has only the model's own
        next token.
      paths: the drafts of the compared methods.
      greedy: texts of the L tokens that greedy decoding emits.
    """

    prompt_tail: str
    positions: list[list[Candidate]]
    paths: list[Path]
    greedy: list[str]


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """The results of one evaluation.

    Attributes:
      title: heading of the report.
      created: ISO date, with or without time.
      task: name of the decoded data.
      device: description of the device.
      methods: methods in the order of the table.
      records: decoded prompts to show, of any methods.
      model, settings, versions: named facts.
      lattice: a lattice to draw.
      curves: training metrics, one row per logged step: `step`, `loss`,
        `loss_head_1` …, `validation_loss`, `validation_loss_head_1` …; all except
        `step` are optional.
      notes: additional sentences.
    """

    title: str
    created: str
    task: str
    device: str
    methods: list[MethodSummary]
    records: list[DecodeRecord] = dataclasses.field(default_factory=list)
    model: Facts = dataclasses.field(default_factory=dict)
    settings: Facts = dataclasses.field(default_factory=dict)
    versions: Facts = dataclasses.field(default_factory=dict)
    lattice: LatticePicture | None = None
    curves: list[dict[str, float]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def drafting(self) -> list[MethodSummary]:
        """The methods that draft and have statistics of their drafts."""
        return [
            m for m in self.methods if m.name != GREEDY_NAME and m.nodes is not None
        ]

    @property
    def best(self) -> MethodSummary | None:
        """The method with the highest block efficiency, except upper bounds."""
        return max(
            (method for method in self.methods if not method.upper_bound),
            key=lambda method: method.block_efficiency,
            default=None,
        )

    @property
    def fastest(self) -> MethodSummary | None:
        """The method with the largest speed-up; None if nothing was timed."""
        timed = [m for m in self.methods if m.speedup and not m.upper_bound]
        return max(timed, key=lambda method: method.speedup or 0.0, default=None)
