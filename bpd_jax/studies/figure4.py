"""Figures 4 and 5 and Table 2: single blocks, and decoding step by step.

What is shown is chosen by rule from all calls that the explorer's records hold: the
blocks in which a refined draft was right further than BPD's.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from bpd_jax.reporting import wording
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Finding, Row, Table
from bpd_jax.reporting.records import Candidate, LatticePicture, Path
from bpd_jax.studies.records import Call, ExplorerRecord, Trace
from bpd_jax.studies.refinements import BPD, MEDUSA, REFINES, method_of
from bpd_jax.studies.results import counted, tasks_of
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import EXPLORER, Study

_PICTURES = 3
_CALLS = 8
# Candidates of each head that are drawn at least, and characters before the block.
_ROWS = 5
_TAIL = 160

ORACLE = "oracle"
# Kinds whose drafts are ways through the heads' lattice.
_IN_LATTICE = {BPD, "zero_gram", MEDUSA, *REFINES}


def accepted(record: ExplorerRecord, at: int, rows: Sequence[int]) -> int:
    """Leading tokens of a draft that greedy decoding writes.

    Worked example: greedy decoding writes `a b c`, and the heads' candidates are x, b
    and c, y. The rows 0 0 0 are `a x c`, of which 1 token is accepted; the rows 0 1 0
    are `a b c`, of which 3 are.

    Args:
      record: the text with the candidates along it.
      at: where the block begins.
      rows: one per position; position 0 is certain and has none but row 0.
    """
    text = record.output[at:]
    columns = [text[:1], *record.candidates[at]]
    count = 0
    for token, column, row in zip(text, columns, rows, strict=False):
        if column[row] != token:
            break
        count += 1
    return count


@dataclasses.dataclass(frozen=True)
class RefinedBlock:
    """One serial call of a refined contender, beside what else the lattice holds.

    Every draft is a row of the lattice per position.

    Attributes:
      record: the text.
      at: position of the block in it.
      best: of every head the best candidate: BPD's draft.
      refined: the draft that won, as far as it stays in the lattice.
      oracle: what greedy decoding writes, where the lattice has it; else row 0.
    """

    record: ExplorerRecord
    at: int
    best: list[int]
    refined: list[int]
    oracle: list[int]

    def accepted(self, rows: Sequence[int]) -> int:
        """Leading tokens of a draft that greedy decoding writes."""
        return accepted(self.record, self.at, rows)

    @property
    def gain(self) -> int:
        """Tokens that the refined draft yields more than BPD's."""
        return self.accepted(self.refined) - self.accepted(self.best)


def blocks_of(record: ExplorerRecord, contender: str) -> Iterator[RefinedBlock]:
    """Calls of a contender of whose draft the lattice has all that was accepted."""
    for call in _trace(record, contender).calls:
        heads = record.candidates[call.at]
        refined = [0]
        for token, column in zip(call.winner[1:], heads, strict=False):
            if token not in column:
                break
            refined.append(column.index(token))
        if len(refined) < call.accepted:
            continue
        following = record.output[call.at + 1 :]
        held = itertools.zip_longest(heads, following[: len(heads)])
        yield RefinedBlock(
            record,
            call.at,
            best=[0] * (1 + len(heads)),
            refined=refined,
            oracle=[
                0,
                *(column.index(t) if t in column else 0 for column, t in held),
            ],
        )


def refined_contender(records: Sequence[ExplorerRecord]) -> str | None:
    """The refined contender with the fewest serial calls over all texts.

    Only contenders that decoded every text count; None if none did.
    """
    calls: dict[str, int] = {}
    for name in dict.fromkeys(t.contender for record in records for t in record.traces):
        traces = [t for record in records for t in record.traces if t.contender == name]
        if method_of(name).kind in REFINES and len(traces) == len(records):
            calls[name] = sum(len(trace.calls) for trace in traces)
    return min(calls, key=calls.__getitem__, default=None)


def telling_blocks(
    records: Sequence[ExplorerRecord], contender: str, tasks: Sequence[str]
) -> list[RefinedBlock]:
    """Of every task the first block that gains most over BPD, most gain first.

    Args:
      records: of all tasks.
      contender: whose drafts are compared with BPD's.
      tasks: in the order that decides between equal gains.
    """
    found = []
    for task in tasks:
        blocks = [
            block
            for record in sorted(records, key=lambda record: record.example)
            if record.task == task
            for block in blocks_of(record, contender)
        ]
        best = max(blocks, key=lambda block: block.gain, default=None)
        if best is not None and best.gain > 0:
            found.append(best)
    return sorted(found, key=lambda block: -block.gain)


def picture(block: RefinedBlock, label: str) -> LatticePicture:
    """The lattice of a block with three ways through it: BPD, refined, oracle."""
    record = block.record
    paths = [
        Path(name, rows, block.accepted(rows))
        for name, rows in (
            ("BPD", block.best),
            (label, block.refined),
            ("Oracle", block.oracle),
        )
    ]
    shown = max(_ROWS, *(1 + row for path in paths for row in path.candidates))
    text = record.output[block.at :]
    before = record.prompt + _text(record, record.output[: block.at])
    return LatticePicture(
        prompt_tail=before[-_TAIL:],
        positions=[
            [Candidate(record.pieces[text[0]], 0.0)],
            *(
                [
                    Candidate(record.pieces[token], log_prob)
                    for token, log_prob in zip(column, scores, strict=True)
                ][:shown]
                for column, scores in zip(
                    record.candidates[block.at], record.log_probs[block.at], strict=True
                )
            ),
        ],
        paths=paths,
        greedy=[record.pieces[token] for token in text[: len(block.best)]],
    )


def steps_table(run: StudyRun, record: ExplorerRecord, contender: str) -> Table:
    """The first calls of BPD and of a refined contender on one text (Table 2)."""
    traces = [_trace(record, name) for name in (BPD, contender)]
    traces = [trace for trace in traces if trace.calls]
    rows = []
    for number in range(min(_CALLS, max(len(trace.calls) for trace in traces))):
        cells = []
        for trace in traces:
            if number < len(trace.calls):
                call = trace.calls[number]
                cells += [Cell(call.accepted), Cell(text=_step(record, call))]
            else:
                cells += [Cell(text="done"), Cell()]
        rows.append(Row(f"{number + 1}", cells))
    totals = []
    for trace in traces:
        tokens = sum(call.accepted for call in trace.calls)
        calls = counted(len(trace.calls), "call")
        totals += [Cell(tokens), Cell(text=f"in {calls}")]
    rows.append(Row("Whole text", totals, strong=True))
    columns = [
        column
        for trace in traces
        for column in (
            Column("Tokens", run.label(trace.contender), digits=0),
            Column("Draft", run.label(trace.contender)),
        )
    ]
    return Table(
        name="table2",
        title=f"Step by step: example {record.example} of "
        f"{run.task_label(record.task)}",
        heading="Serial call",
        columns=columns,
        rows=rows,
        caption="The draft that won in every call; what was rejected stands in ⟦ ⟧.",
    )


def _trace(record: ExplorerRecord, contender: str) -> Trace:
    """What a contender did; nothing if it did not decode the text."""
    found = (trace for trace in record.traces if trace.contender == contender)
    return next(found, Trace(contender, contender, []))


def _text(record: ExplorerRecord, tokens: Sequence[int]) -> str:
    return "".join(record.pieces[token] for token in tokens)


def _step(record: ExplorerRecord, call: Call) -> str:
    """Accepted tokens, then the rejected ones in brackets."""
    kept = _text(record, call.winner[: call.accepted])
    dropped = _text(record, call.winner[call.accepted :])
    return wording.visible(kept + (f"⟦{dropped}⟧" if dropped else ""))


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws up to three lattices, and the first calls of the text of the first."""
    records = run.of(ExplorerRecord)
    known = tasks_of(run)
    tasks = [*known, *sorted({record.task for record in records} - set(known))]
    contender = refined_contender(records)
    lattices, tables, notes = [], [], []
    if contender is None:
        notes.append("No refined contender was recorded on every text.")
    else:
        blocks = telling_blocks(records, contender, tasks)
        lattices = [
            picture(block, run.label(contender)) for block in blocks[:_PICTURES]
        ]
        if blocks:
            tables.append(steps_table(run, blocks[0].record, contender))
        else:
            notes.append("In no block was the refined draft right further than BPD’s.")
        notes.append(
            "Chosen by rule: of all refined contenders the one with the fewest serial "
            "calls; of each task the first block in which its draft gains most over "
            f"BPD’s; of those the {_PICTURES} that gain most."
        )
        if blocks:
            places = "; ".join(
                f"{run.task_label(block.record.task)}, example {block.record.example}, "
                f"token {block.at + 1}"
                for block in blocks[:_PICTURES]
            )
            notes.append(f"The lattices are of: {places}.")
    return study.show(
        run,
        tables=tables,
        lattices=lattices,
        findings=[_bounded(records), _further(run, records, contender)],
        notes=notes,
    )


def _bounded(records: Sequence[ExplorerRecord]) -> Finding:
    """The oracle's recorded calls against those of the others in its lattice."""
    statement = (
        "Where the oracle and another way through the lattice begin at one token, the "
        "oracle is right at least as far."
    )
    margins: list[int] = []
    others: set[str] = set()
    for record in records:
        bounds = {call.at: call.accepted for call in _trace(record, ORACLE).calls}
        for trace in record.traces:
            method = method_of(trace.contender)
            if method.kind not in _IN_LATTICE or method.beside:
                continue
            found = [
                bounds[call.at] - call.accepted
                for call in trace.calls
                if call.at in bounds
            ]
            margins += found
            others |= {trace.contender} if found else set()
    if not margins:
        return Finding(statement, None, "Not measured.")
    further, less = (sum(sign * margin > 0 for margin in margins) for sign in (1, -1))
    return Finding(
        statement,
        not less,
        f"{counted(len(margins), 'call')} of {counted(len(others), 'method')} beside "
        f"the recorded calls of the oracle: it is further in {further:,}, as far in "
        f"{len(margins) - further - less:,}, less far in {less:,}.",
    )


def _further(
    run: StudyRun, records: Sequence[ExplorerRecord], contender: str | None
) -> Finding:
    statement = "Refined drafts are more often right further than BPD’s than less far."
    if contender is None:
        return Finding(statement, None, "Not measured.")
    gains = []
    for record in records:
        for call in _trace(record, contender).calls:
            best = [0] * (1 + len(record.candidates[call.at]))
            gains.append(call.accepted - accepted(record, call.at, best))
    wins, losses = (sum(sign * gain > 0 for gain in gains) for sign in (1, -1))
    return Finding(
        statement,
        wins > losses,
        f"{run.label(contender)}, {counted(len(gains), 'call')}: further in {wins:,}, "
        f"as far in {len(gains) - wins - losses:,}, less far in {losses:,}.",
    )


STUDY = Study(
    name="figure4",
    title="The lattice of one block",
    paper="Figures 4 and 5, Table 2",
    question=(
        "What does refinement do to a single draft: which candidates do the heads "
        "offer, which path does each method take, and how far is it right?"
    ),
    present=present,
    measures=(EXPLORER,),
)
