"""Figures 4 and 5 and Table 2: single blocks, and decoding step by step.

A rule selects the blocks from all serial calls in the explorer's records: those in
which a refined draft has more accepted tokens than BPD's.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.evaluation.block_views import BlockView, view_block
from bpd_jax.reporting import formatting
from bpd_jax.reporting.evaluation_records import lattice_picture
from bpd_jax.reporting.exhibits import Cell, Column, Table
from bpd_jax.reporting.records import LatticePicture
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import EXPLORER, Study
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.study_records import Call, ExplorerRecord, Trace
from bpd_jax.studies.tables import ALL, Judgement, by_row, counted, finding, table
from experiments.refinements import is_bounded, is_refined, method_of

_PICTURES = 3
_CALLS = 8
# Minimum number of candidates drawn for each head, and characters before the block.
_ROWS = 5
_TAIL = 160

_ORACLE = method_of("oracle")


class BlockExample(NamedTuple):
    """A serial call of a refined contender: its text, position and draft."""

    record: ExplorerRecord
    at: int
    view: BlockView


def view_of(record: ExplorerRecord, at: int, label: str, draft: list[int]) -> BlockView:
    """A block of a recorded text, with tokens as indices into the text's pieces.

    Worked example: greedy decoding writes `a b c`, and the heads' candidates are x, b
    and c, y. BPD drafts `a x c`, of which 1 token is accepted; of the draft `a b c` all
    3 are.

    Args:
      record: the text with the candidates along it.
      at: position at which the block begins.
      label, draft: label and draft of a refined method.
    """
    heads, scores = record.candidates[at], record.log_probs[at]
    # The first token is certain: its position has no other candidate.
    padding = len(heads[0]) - 1 if heads else 0
    certain = [record.output[at], *[-1] * padding]
    text = record.output[at : at + 1 + len(heads)]
    text += [-1] * (1 + len(heads) - len(text))
    return view_block(
        np.array(record.output[:at], int),
        np.array([certain, *heads]),
        np.array([[0.0, *[-np.inf] * padding], *scores]),
        np.array(text),
        {label: np.array(draft)},
    )


def blocks_of(
    record: ExplorerRecord, contender: str, label: str = ""
) -> Iterator[BlockExample]:
    """The calls of a contender whose accepted tokens are all in the lattice."""
    for call in _trace(record, contender).calls:
        view = view_of(record, call.at, label, call.winner)
        if len(view.paths[1].candidates) >= call.accepted:
            yield BlockExample(record, call.at, view)


def refined_contender(records: Sequence[ExplorerRecord]) -> str | None:
    """The refined contender with the fewest serial calls over all texts.

    Contenders that did not decode every text are ignored; None if there is no other.
    """
    calls: dict[str, int] = {}
    for name in dict.fromkeys(t.contender for record in records for t in record.traces):
        traces = [t for record in records for t in record.traces if t.contender == name]
        if is_refined(method_of(name)) and len(traces) == len(records):
            calls[name] = sum(len(trace.calls) for trace in traces)
    return min(calls, key=calls.__getitem__, default=None)


class _Figure4Data(NamedTuple):
    """A run, the refined contender to show, and its blocks by decreasing gain.

    There is one block per task, the one with the largest gain over BPD, if any gains;
    blocks with equal gains are in the order of tasks.
    """

    run: StudyRun
    records: list[ExplorerRecord]
    contender: str | None
    blocks: list[BlockExample]


def _prepare(run: StudyRun) -> _Figure4Data:
    records = sorted(run.of(ExplorerRecord), key=lambda record: record.example)
    contender = refined_contender(records)
    if contender is None:
        return _Figure4Data(run, records, None, [])
    tasks = [*run.tasks, *sorted({record.task for record in records} - {*run.tasks})]
    blocks = [
        max(
            (
                block
                for record in records
                if record.task == task
                for block in blocks_of(record, contender, run.label(contender))
            ),
            key=lambda block: block.view.gain,
            default=None,
        )
        for task in tasks
    ]
    gaining = [block for block in blocks if block and block.view.gain[0] > 0]
    gaining.sort(key=lambda block: -block.view.gain[0])
    return _Figure4Data(run, records, contender, gaining)


def _lattices(data: _Figure4Data) -> list[LatticePicture]:
    """The lattices of the first blocks with the paths of BPD, refined and oracle."""
    pictures = []
    for record, at, view in data.blocks[:_PICTURES]:
        rows = max(1 + row for path in view.paths for row in path.candidates)
        picture = lattice_picture(
            view,
            lambda _: "",
            record.pieces.__getitem__,
            max(_ROWS, rows),
        )
        before = record.prompt + _text(record, record.output[:at])
        pictures.append(dataclasses.replace(picture, prompt_tail=before[-_TAIL:]))
    return pictures


def _steps_table(data: _Figure4Data) -> list[Table]:
    """The first calls on the text of the first block (Table 2)."""
    if not data.blocks or data.contender is None:
        return []
    run, record = data.run, data.blocks[0].record
    traces = [_trace(record, name) for name in (BPD, data.contender)]
    traces = [trace for trace in traces if trace.calls]
    columns = [
        column
        for trace in traces
        for column in (
            Column("Tokens", run.label(trace.contender), digits=0),
            Column("Draft", run.label(trace.contender)),
        )
    ]

    def cells(number: int | None) -> list[Cell]:
        row = []
        for calls in (trace.calls for trace in traces):
            if number is ALL:
                total = Cell(sum(call.accepted for call in calls))
                row += [total, Cell(text=f"in {counted(len(calls), 'call')}")]
            elif number < len(calls):
                call = calls[number]
                row += [Cell(call.accepted), Cell(text=_step(record, call))]
            else:
                row += [Cell(text="done"), Cell()]
        return row

    most = min(_CALLS, max(len(trace.calls) for trace in traces))
    title = f"Step by step: example {record.example} of {run.task_label(record.task)}"
    steps = table(
        "table2",
        title,
        "Serial call",
        {**{number: f"{number + 1}" for number in range(most)}, ALL: "Whole text"},
        by_row(columns, cells),
        "The winning draft of every call; rejected tokens are in ⟦ ⟧.",
    )
    return [steps]


def _trace(record: ExplorerRecord, contender: str) -> Trace:
    """The trace of a contender; without calls if it did not decode the text."""
    traces = (trace for trace in record.traces if trace.contender == contender)
    return next(traces, Trace(contender, contender, []))


def _text(record: ExplorerRecord, tokens: Sequence[int]) -> str:
    return "".join(record.pieces[token] for token in tokens)


def _step(record: ExplorerRecord, call: Call) -> str:
    """Accepted tokens, then the rejected ones in brackets."""
    accepted = _text(record, call.winner[: call.accepted])
    rejected = _text(record, call.winner[call.accepted :])
    return formatting.visible(accepted + (f"⟦{rejected}⟧" if rejected else ""))


def _notes(data: _Figure4Data) -> list[str]:
    if data.contender is None:
        return ["No refined contender was recorded on every text."]
    rule = (
        "Selection: the refined contender with the fewest serial calls; for each task, "
        "the first block in which its draft gains most over BPD’s; of these blocks, "
        f"the {_PICTURES} with the largest gains."
    )
    if not data.blocks:
        return [
            "In no block does the refined draft have more accepted tokens than BPD’s.",
            rule,
        ]
    blocks = "; ".join(
        f"{data.run.task_label(record.task)}, example {record.example}, token {at + 1}"
        for record, at, _ in data.blocks[:_PICTURES]
    )
    return [rule, f"The lattices are those of {blocks}."]


def _outcomes(margins: Sequence[int]) -> str:
    """Numbers of calls in which one draft has more accepted tokens, as many, fewer."""
    more, fewer = (sum(sign * margin > 0 for margin in margins) for sign in (1, -1))
    return (
        f"more accepted tokens in {more:,}, equally many in "
        f"{len(margins) - more - fewer:,}, fewer in {fewer:,}."
    )


@finding(
    "Where the oracle and another path through the lattice begin at the same token, "
    "the oracle has at least as many accepted tokens."
)
def _bounded(data: _Figure4Data) -> Judgement | str:
    margins: list[int] = []
    contenders: set[str] = set()
    for record in data.records:
        oracles = [t for t in record.traces if method_of(t.contender) == _ORACLE]
        bounds = {call.at: call.accepted for t in oracles for call in t.calls}
        for trace in record.traces:
            shared = [call for call in trace.calls if call.at in bounds]
            if shared and is_bounded(method_of(trace.contender), _ORACLE):
                margins += [bounds[call.at] - call.accepted for call in shared]
                contenders.add(trace.contender)
    if not margins:
        return "Not measured."
    return (
        min(margins) >= 0,
        f"{counted(len(margins), 'call')} of {counted(len(contenders), 'method')} at "
        f"positions where the oracle was called too: it has {_outcomes(margins)}",
    )


@finding("Refined drafts have more accepted tokens than BPD’s more often than fewer.")
def _more_accepted(data: _Figure4Data) -> Judgement | str:
    if data.contender is None:
        return "Not measured."
    gains = [
        call.accepted - view_of(record, call.at, "", call.winner).paths[0].accepted
        for record in data.records
        for call in _trace(record, data.contender).calls
    ]
    return (
        sum((gain > 0) - (gain < 0) for gain in gains) > 0,
        f"{data.run.label(data.contender)}, {counted(len(gains), 'call')}: "
        f"{_outcomes(gains)}",
    )


STUDY = Study(
    "figure4",
    "The lattice of one block",
    "Figures 4 and 5, Table 2",
    "What does refinement do to a single draft: which candidates do the heads offer, "
    "which path does each method take, and how many of its tokens are accepted?",
    measures=(EXPLORER,),
    prepare=_prepare,
    tables=[_steps_table],
    lattices=[_lattices],
    findings=[_bounded, _more_accepted],
    notes=[_notes],
)
