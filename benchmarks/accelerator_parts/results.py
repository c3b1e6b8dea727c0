"""Files of results, and the tables generated from them."""

import pathlib
import re
from collections.abc import Iterator
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.storage import files

FOLDER = pathlib.Path("benchmarks/results")
PAGE = pathlib.Path("docs/accelerators.md")
PARTS = ("attention", "plain", "smollm2", "shapes", "training")

_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"
_NOTHING = "Nothing has been measured on an accelerator yet."

Results = dict[str, Any]


def path_of(folder: pathlib.Path, device: str, part: str) -> pathlib.Path:
    """The file of a part, such as `accelerator_nvidia_h200_plain.json`."""
    slug = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return folder / f"accelerator_{slug}_{part}.json"


def read(path: pathlib.Path) -> Results | None:
    """The results of earlier runs; None if there are none.

    Raises:
      UserError: the file is damaged.
    """
    try:
        stored = files.read_json(path)
        if not isinstance(stored["rows"], dict) or stored["part"] not in PARTS:
            raise ValueError("it has no rows of a part")
        return stored
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} does not hold measurements: {error}; move it away and run again."
        ) from error


def tables(folder: pathlib.Path) -> str:
    """Markdown: a section for each device, with a table for each measured part."""
    measured = [read(path) for path in sorted(folder.glob("accelerator_*.json"))]
    # Results of a CPU only show that the command works.
    real = [each for each in measured if each and each["platform"] != "cpu"]
    lines = []
    for device in sorted({each["device"] for each in real}):
        lines += [f"### {device}", ""]
        for part in PARTS:
            for each in real:
                if each["device"] == device and each["part"] == part:
                    lines += [*_table(each), ""]
    return "\n".join(lines).rstrip() or _NOTHING


def update_page(page: pathlib.Path, folder: pathlib.Path) -> None:
    """Replaces the text between the two markers of a page by the tables.

    Raises:
      UserError: the page cannot be read or has no markers.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {page}: {error.strerror}.") from error
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise UserError(f"{page} has no lines {_BEGIN} and {_END}: add them.")
    new = f"{before}{begin}\n\n{tables(folder)}\n\n{end}{after}"
    files.write_text(page, new)


def _table(results: Results) -> Iterator[str]:
    """A title with command, dates and versions, and the table."""
    part, rows = results["part"], results["rows"]
    dates = sorted({row["date"] for row in rows.values()})
    versions = next(reversed(rows.values()))["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield (
        f"`{part}`: {' and '.join(dict.fromkeys([dates[0], dates[-1]]))}; {named}; `"
        f"{next(reversed(rows.values()))['command']}`"
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


def _attention(rows: Results) -> _Body:
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


def _plain(rows: Results) -> _Body:
    headings = ["model", "ms per call", "reading the weights", "ratio", "tokens/s"]
    return headings, [
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


def _smollm2(rows: Results) -> _Body:
    headings = [
        "method",
        "tokens per call",
        "tokens/s",
        "speed-up",
        "texts that differ",
    ]
    return headings, [
        [
            f"{name}: `{method}`",
            f"{each['tokens_per_call']:.2f}",
            f"{each['tokens_per_second']:,.0f}",
            f"{each['speedup']:.2f}",
            f"{each['texts_that_differ']} ({each['of_them_near_ties']} near ties)",
        ]
        for name, row in rows.items()
        for method, each in row["methods"].items()
    ]


def _shapes(rows: Results) -> _Body:
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


def _training(rows: Results) -> _Body:
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


_BODIES = {
    "attention": _attention,
    "plain": _plain,
    "smollm2": _smollm2,
    "shapes": _shapes,
    "training": _training,
}
