"""The report as one HTML file that needs nothing but itself.

Everything is rendered here, in Python, so every text is escaped in one place; the
page's script only shows and hides. The page's own security policy allows no network
and no script but that one.
"""

import base64
import hashlib
import importlib.resources
import os
import string
from collections.abc import Callable, Sequence

from bpd_jax import files
from bpd_jax.reporting import curves, lattice, statistics, viewer, wording
from bpd_jax.reporting.records import Facts, MethodSummary, Report
from bpd_jax.reporting.wording import escaped


def write_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes the report as one self-contained HTML file.

    Args:
      report: what to show; sections without content are left out.
      path: the file; it is replaced only when the new one is complete.

    Raises:
      UserError: the file cannot be written.
    """
    page = render(report)
    with files.replacing_file(path) as temporary:
        # Other line ends would change the script, and with it its digest.
        temporary.write_text(page, encoding="utf-8", newline="\n")


def render(report: Report) -> str:
    """Returns the HTML page of a report."""
    script = _resource("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    meta = " · ".join(filter(None, [report.task, report.device, report.created]))
    sections: list[tuple[str, str, Callable[[Report], str]]] = [
        ("methods", "Methods", _methods),
        ("statistics", "What the drafts look like", statistics.section),
        ("drafts", "Drafts, step by step", viewer.drafts),
        ("lattice", "The lattice of one block", lattice.section),
        ("training", "Training", curves.section),
        ("notes", "Notes", _notes),
        ("definitions", "How to read the numbers", _definitions),
        ("setup", "Setting", _setup),
    ]
    return string.Template(_resource("report.html")).substitute(
        title=escaped(report.title),
        meta=escaped(meta),
        # A number keeps its percent sign when the line breaks.
        summary=escaped(wording.summary_sentence(report)).replace(" %", "\u00a0%"),
        tiles=_tiles(report),
        sections="\n".join(
            f'<section aria-labelledby="{key}"><h2 id="{key}">{heading}</h2>'
            f"{body}</section>"
            for key, heading, render_section in sections
            if (body := render_section(report))
        ),
        footer=f"Written by bpd_jax on {escaped(report.created)}.",
        style=_resource("report.css"),
        script=script,
        script_hash=f"sha256-{digest}",
    )


def _resource(name: str) -> str:
    folder = importlib.resources.files("bpd_jax.reporting")
    return (folder / name).read_text(encoding="utf-8")


def _tiles(report: Report) -> str:
    """The key numbers of the best method."""
    best = wording.best_method(report)
    if best is None:
        return ""
    saved = 1 - best.serial_calls / best.tokens if best.tokens else None
    differing = sum(method.differing for method in report.methods)
    ties = differing and differing == sum(method.near_ties for method in report.methods)
    tiles = [
        ("Block efficiency", f"{best.block_efficiency:.2f}", best.label),
        ("Gain over BPD", wording.percent(best.gain), "in block efficiency"),
        (
            "Serial calls saved",
            wording.percent(saved, sign=False),
            "against one call per token",
        ),
        (
            "Outputs that differ",
            str(differing),
            "all at near-ties" if ties else "from greedy decoding",
        ),
    ]
    return (
        '<dl class="tiles card">'
        + "".join(
            f"<div><dt>{name}</dt><dd>{value}</dd><dd>{escaped(note)}</dd></div>"
            for name, value, note in tiles
        )
        + "</dl>"
    )


def _methods(report: Report) -> str:
    best = wording.best_method(report)
    # The longest bar, or the end of its bracket, fills the column.
    top = max(
        (max([m.block_efficiency, *(m.interval or ())]) for m in report.methods),
        default=1.0,
    )
    rows = "".join(_method_row(m, top, m is best) for m in report.methods)
    headings = [
        "Method",
        "Block efficiency",
        "Gain over BPD",
        "Serial calls",
        "Tokens",
        "Wall time",
        "Speed-up",
        "Output",
    ]
    return (
        "<p>Greedy decoding of the same prompts by every method. Bars start at zero; "
        "a bracket marks the bootstrap interval where one was computed.</p>"
        '<div class="card scroll" role="region" aria-labelledby="methods" '
        'tabindex="0"><table><thead><tr>'
        + "".join(f'<th scope="col">{heading}</th>' for heading in headings)
        + f"</tr></thead><tbody>{rows}</tbody></table></div>"
        + _list(wording.divergence_sentences(report))
    )


def _method_row(method: MethodSummary, top: float, best: bool) -> str:
    style = "best" if best else "bound" if method.upper_bound else ""
    note = f"<small>{escaped(method.note)}</small>" if method.note else ""
    interval = wording.interval(method)
    whisker = ""
    if method.interval is not None:
        low, high = (f"{100 * bound / top:.2f}%" for bound in method.interval)
        whisker = f'<b style="--low:{low};--high:{high}"></b>'
    return (
        f'<tr class="{style}">'
        f'<th scope="row">{escaped(wording.labelled(method))}{note}</th>'
        f"<td><b>{method.block_efficiency:.2f}</b>"
        + (f"<small>{interval}</small>" if interval else "")
        + '<span class="bar" aria-hidden="true">'
        f'<i style="--value:{100 * method.block_efficiency / top:.2f}%"></i>'
        f"{whisker}</span></td>"
        f"<td>{wording.percent(method.gain)}</td>"
        f"<td>{method.serial_calls:,}</td><td>{method.tokens:,}</td>"
        f"<td>{wording.seconds(method.seconds)} s</td>"
        f"<td>{wording.speedup(method)}</td>"
        f'<td class="{method.agreement}">{wording.verdict(method)}</td></tr>'
    )


def _notes(report: Report) -> str:
    return _list(report.notes)


def _list(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{escaped(sentence)}</li>" for sentence in sentences)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _definitions(report: Report) -> str:
    return _pairs(wording.DEFINITIONS, "pairs definitions")


def _setup(report: Report) -> str:
    groups = {
        "Model": report.model,
        "Settings": report.settings,
        "Versions": report.versions,
        "Run": {
            "task": report.task,
            "device": report.device,
            "created": report.created,
        },
    }
    return (
        '<div class="facts">'
        + "".join(
            f'<div class="card"><h3>{name}</h3>{_pairs(facts, "pairs")}</div>'
            for name, facts in groups.items()
            if facts
        )
        + "</div>"
    )


def _pairs(facts: Facts, style: str) -> str:
    return (
        f'<dl class="{style}">'
        + "".join(
            f"<dt>{escaped(str(name))}</dt><dd>{escaped(wording.fact(value))}</dd>"
            for name, value in facts.items()
        )
        + "</dl>"
    )
