"""The file of results, and the tables generated from it.

Every line of `accelerator.jsonl` is a JSON object: the result of one job on one device.
Of several lines with the same device, part and job the last one counts.
"""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.accelerator_parts import speedups
from bpd_jax.base.errors import UserError
from bpd_jax.storage import files
from bpd_jax.storage.paths import in_bucket

FOLDER = pathlib.Path("benchmarks/results")
PAGE = pathlib.Path("docs/measured.md")
FILE = "accelerator.jsonl"

# The parts in the order in which they run, and the seconds that each may take; the last
# one has all the time that is left.
PARTS = {
    "attention": 75,
    "lossless": 120,
    "plain": 120,
    "costs": 200,
    "smollm2": 200,
    "training": 150,
    "joint": 3600,
}

_MARKS = ("<!-- {}: begin -->", "<!-- {}: end -->")
_NOTHING = "Nothing has been measured on an accelerator yet."

Row = Mapping[str, Any]


def append(folder: pathlib.Path, row: Row) -> None:
    """Adds a line to the file, which is on the disk when the function returns."""
    line = json.dumps(row) + "\n"
    if in_bucket(folder):  # An object is replaced as a whole.
        path = folder / FILE
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        files.write_text(path, before + line)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as stream:
        stream.write(line)
        stream.flush()
        os.fsync(stream.fileno())


def read(folder: pathlib.Path) -> list[Row]:
    """The latest result of each job; [] if there is no file."""
    path = folder / FILE
    rows: dict[tuple[str, str, str], Row] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if row["part"] not in PARTS:
                raise ValueError(f"{row['part']!r} is not a part")
            key = (row["device"], row["part"], row["job"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"line {number} of {path} is not a result ({error}): remove it."
            ) from error
        rows.pop(key, None)
        rows[key] = row
    return list(rows.values())


def tables(rows: Sequence[Row]) -> str:
    """Markdown: a section for each device, with a table for each measured part."""
    # Results of a CPU only show that the command works.
    real = [row for row in rows if row["platform"] != "cpu"]
    lines = []
    for device in sorted({row["device"] for row in real}):
        lines += [f"### {device}", ""]
        for part in PARTS:
            of_part = {
                row["job"]: row
                for row in real
                if (row["device"], row["part"]) == (device, part)
            }
            if of_part:
                lines += [*_table(part, of_part), ""]
    return "\n".join(lines).rstrip() or _NOTHING


def update_page(page: pathlib.Path, rows: Sequence[Row]) -> None:
    """Replaces the predictions and the results of a page, each between two markers."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {page}: {error.strerror}.") from error
    for name, table in (
        ("predictions", speedups.table(rows)),
        ("tables", tables(rows)),
    ):
        first, last = (mark.format(name) for mark in _MARKS)
        before, begin, rest = text.partition(first)
        _, end, after = rest.partition(last)
        if not begin or not end:
            raise UserError(f"{page} has no lines {first} and {last}: add them.")
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    files.write_text(page, text)


def _table(part: str, rows: Mapping[str, Row]) -> Iterator[str]:
    """A title with command, dates and versions, and the table."""
    dates = sorted({row["date"] for row in rows.values()})
    latest = list(rows.values())[-1]
    named = ", ".join(f"{name} {number}" for name, number in latest["versions"].items())
    yield (
        f"`{part}`: {' and '.join(dict.fromkeys([dates[0], dates[-1]]))}; {named}; `"
        f"{latest['command']}`"
    )
    yield ""
    headings, body = _BODIES[part](
        {name: row for name, row in rows.items() if "failed" not in row}
    )
    yield "| " + " | ".join(headings) + " |"
    yield "|---|" + "--:|" * (len(headings) - 1)
    for cells in body:
        yield "| " + " | ".join(cells) + " |"
    for name, row in rows.items():
        if "failed" in row:
            cells = [name, f"failed: {row['failed']}".replace("|", "/")]
            yield "| " + " | ".join([*cells, *[""] * (len(headings) - 2)]) + " |"


_Body = tuple[list[str], list[list[str]]]


def _attention(rows: Mapping[str, Row]) -> _Body:
    headings = ["kernel", "largest error", "passed", "ms"]
    return headings, [
        [
            name,
            f"{max(row['errors'].values()):.2g}",
            "yes" if row["passed"] else "**no**",
            f"{row.get('ms_forward_backward', row.get('ms_forward')):.3g}",
        ]
        for name, row in rows.items()
    ]


def _lossless(rows: Mapping[str, Row]) -> _Body:
    return ["method, tiny model", "tokens per call", "texts that differ"], [
        [
            f"`{name}`",
            f"{row['tokens_per_call']:.2f}",
            f"{row['texts_that_differ']} of {row['texts']}",
        ]
        for name, row in rows.items()
    ]


def _plain(rows: Mapping[str, Row]) -> _Body:
    headings = ["model", "ms per call", "reading the weights", "ratio", "tokens/s"]
    copies = [
        [f"{name}: {row['bytes_per_second'] / 1e9:,.0f} GB/s", *[""] * 4]
        for name, row in rows.items()
        if "ms_floor" not in row
    ]
    return headings, copies + [
        [
            name,
            f"{row['ms_per_call']:.3g}",
            f"{row['ms_floor']:.3g}",
            f"{row['times_floor']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
        ]
        for name, row in rows.items()
        if "ms_floor" in row
    ]


def _smollm2(rows: Mapping[str, Row]) -> _Body:
    headings = [
        "method",
        "tokens per call",
        "tokens/s",
        "plain",
        "speed-up",
        "texts that differ",
    ]
    return headings, [
        [
            f"`{name}`",
            f"{row['tokens_per_call']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['plain_tokens_per_second']:,.0f}",
            f"{row['speedup']:.2f}",
            f"{row['texts_that_differ']} ({row['of_them_near_ties']} near ties)",
        ]
        for name, row in rows.items()
    ]


def _costs(rows: Mapping[str, Row]) -> _Body:
    passes = {n: r["ms_by_tokens"] for n, r in rows.items() if "ms_by_tokens" in r}
    sizes = list(dict.fromkeys(m for each in passes.values() for m in each))
    headings = ["ms of a pass over", *sizes] if sizes else ["drafting", "ms"]
    body = [
        [name.removesuffix(", passes"), *(f"{each[m]:.3g}" for m in sizes if m in each)]
        for name, each in passes.items()
    ]
    empty = [""] * max(len(headings) - 2, 0)
    body += [
        [f"drafting, {name}", f"{row['ms_drafting']:.3g}", *empty]
        for name, row in rows.items()
        if "ms_drafting" in row
    ]
    return headings, body


def _training(rows: Mapping[str, Row]) -> _Body:
    headings = ["step", "tokens/s", "MFU", "planned GB per device"]
    return headings, [
        [
            name,
            f"{row['tokens_per_second']:,.0f}",
            "—" if row["mfu"] is None else f"{100 * row['mfu']:.0f} %",
            f"{row['planned_bytes_per_device'] / 1e9:.1f}",
        ]
        for name, row in rows.items()
    ]


def _joint(rows: Mapping[str, Row]) -> _Body:
    headings = ["model", "steps", "tokens/s", "MFU", "loss", "tokens per call of BPD"]
    return headings, [
        [
            name,
            f"{row['steps']:,}",
            f"{row['tokens_per_second']:,.0f}",
            "—" if row["mfu"] is None else f"{100 * row['mfu']:.0f} %",
            f"{row['log'][-1]['loss']:.2f}",
            f"{row['tokens_per_call']:.2f}",
        ]
        for name, row in rows.items()
    ]


_BODIES = {
    "attention": _attention,
    "lossless": _lossless,
    "plain": _plain,
    "smollm2": _smollm2,
    "costs": _costs,
    "training": _training,
    "joint": _joint,
}
