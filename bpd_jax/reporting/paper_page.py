"""All studies as one HTML page that needs nothing but itself.

As in `bpd_jax.reporting.html`, every text is escaped on its way into the page, and the
page's own security policy allows no network and no script but the page's.
"""

import base64
import dataclasses
import hashlib
import importlib.resources
import os
import string
from collections.abc import Iterable, Sequence

from bpd_jax import files
from bpd_jax.reporting import exhibit_html, explorer, setting
from bpd_jax.reporting.exhibits import Exhibit
from bpd_jax.reporting.explorer import ExplorerText
from bpd_jax.reporting.records import Facts
from bpd_jax.reporting.terms import TERMS
from bpd_jax.reporting.wording import escaped

SUMMARY, EXPLORER = "summary", "explorer-title"
# More statements than these are folded away by exhibit.
_SHOWN = 12


@dataclasses.dataclass(frozen=True)
class KeyFigure:
    """One of the few numbers that a reader should remember."""

    name: str
    value: str
    note: str


@dataclasses.dataclass(frozen=True)
class Part:
    """An exhibit at its place on the page.

    Attributes:
      key: its id, which is no other's.
      exhibit: what it shows.
      size: which of several runs of its study it is, such as `smollm2`; "" if alone.
    """

    key: str
    exhibit: Exhibit
    size: str = ""

    @property
    def title(self) -> str:
        """Of its section."""
        return (
            f"{self.exhibit.title} · {self.size}" if self.size else (self.exhibit.title)
        )


@dataclasses.dataclass(frozen=True)
class PaperReport:
    """What the page shows.

    Attributes:
      title: heading of the page.
      created: ISO date.
      parts: exhibits in their order.
      figures: at most a handful of numbers.
      texts: of the explorer.
    """

    title: str
    created: str
    parts: list[Part]
    figures: list[KeyFigure] = dataclasses.field(default_factory=list)
    texts: list[ExplorerText] = dataclasses.field(default_factory=list)


def write_page(report: PaperReport, path: str | os.PathLike[str]) -> None:
    """Writes the page; the file is replaced only when the new one is complete.

    Raises:
      UserError: the file cannot be written.
    """
    page = render(report)
    with files.replacing_file(path) as temporary:
        # Other line ends would change the script, and with it its digest.
        temporary.write_text(page, encoding="utf-8", newline="\n")


def render(report: PaperReport) -> str:
    """Returns the page."""
    script = "".join(map(_resource, ("paper.js", "explorer.js")))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = [
        f'<section aria-labelledby="{SUMMARY}"><h2 id="{SUMMARY}">Summary</h2>'
        f"{_summary(report)}</section>",
        *(
            exhibit_html.section(part.key, part.title, part.exhibit)
            for part in report.parts
        ),
    ]
    if body := explorer.section(report.texts):
        sections.append(
            f'<section aria-labelledby="{EXPLORER}"><h2 id="{EXPLORER}">Draft explorer'
            f"</h2>{body}</section>"
        )
    return string.Template(_resource("paper.html")).substitute(
        title=escaped(report.title),
        meta=escaped(" · ".join(_run_words(report))),
        summary=escaped(summary_sentence(report)),
        tiles=_tiles(report.figures),
        terms=_terms(),
        contents=_contents(report),
        sections="\n".join(sections),
        footer=f"Written by bpd_jax on {escaped(report.created)}.",
        style="".join(map(_resource, ("report.css", "charts.css", "paper.css"))),
        script=script,
        script_hash=f"sha256-{digest}",
    )


def _resource(name: str) -> str:
    folder = importlib.resources.files("bpd_jax.reporting")
    return (folder / name).read_text(encoding="utf-8")


def summary_sentence(report: PaperReport) -> str:
    """Returns how many of the paper's statements were borne out."""
    verdicts = [f.holds for part in report.parts for f in part.exhibit.findings]
    if not verdicts:
        return "No statement of the paper was checked."
    holding, failing = verdicts.count(True), verdicts.count(False)
    sentence = f"Of {len(verdicts)} statements that were checked, {holding} "
    sentence += "holds" if holding == 1 else "hold"
    if failing:
        sentence += f", {failing} {'does' if failing == 1 else 'do'} not"
    if open_ones := verdicts.count(None):
        sentence += f", {open_ones} cannot be told"
    return f"{sentence}."


def _distinct(report: PaperReport, name: str) -> list[str]:
    """What the runs say of one fact, each answer once."""
    values = [part.exhibit.facts.get(name) for part in report.parts]
    return list(dict.fromkeys(exhibit_html.plain(v) for v in values if v))


def _run_words(report: PaperReport) -> Iterable[str]:
    for name in ("model", "device"):
        yield from _distinct(report, name)
    dates = sorted(_distinct(report, "date"))
    yield from dict.fromkeys(dates[:1] + dates[-1:])


def _tiles(figures: Sequence[KeyFigure]) -> str:
    tiles = "".join(
        f"<div><dt>{escaped(figure.name)}</dt><dd>{escaped(figure.value)}</dd>"
        f"<dd>{escaped(figure.note)}</dd></div>"
        for figure in figures
    )
    return f'<dl class="tiles card">{tiles}</dl>' if tiles else ""


def _terms() -> str:
    pairs = "".join(
        f"<dt>{escaped(term)}</dt><dd>{escaped(words)}</dd>"
        for term, words in TERMS.items()
    )
    return (
        '<details class="terms card"><summary>What the words mean</summary>'
        f'<dl class="pairs definitions">{pairs}</dl></details>'
    )


def _contents(report: PaperReport) -> str:
    entries = [(SUMMARY, "Summary", "")]
    entries += [
        (part.key, part.title, part.exhibit.paper or "Beyond the paper")
        for part in report.parts
    ]
    if report.texts:
        entries.append((EXPLORER, "Draft explorer", ""))
    items = "".join(
        f'<li><a href="#{escaped(key)}">{escaped(title)}'
        + (f"<small>{escaped(paper)}</small>" if paper else "")
        + "</a></li>"
        for key, title, paper in entries
    )
    return f"<ol>{items}</ol>"


def _summary(report: PaperReport) -> str:
    """The statements of the paper by exhibit, and what was run."""
    parts = [part for part in report.parts if part.exhibit.findings]
    several = sum(len(part.exhibit.findings) for part in parts) > _SHOWN
    groups = "".join(_statements(part, opened=not several) for part in parts)
    return (f'<div class="statements card">{groups}</div>' if groups else "") + (
        _setting(report)
    )


def _statements(part: Part, *, opened: bool) -> str:
    """One exhibit's statements: a sign for each, and a table that can be unfolded."""
    found = part.exhibit.findings
    signs = "".join(exhibit_html.sign(finding.holds) for finding in found)
    rows = "".join(
        f'<tr><th scope="row">{escaped(finding.statement)}</th>'
        f"<td>{exhibit_html.verdict(finding.holds)}</td>"
        f"<td>{exhibit_html.evidence(finding)}</td></tr>"
        for finding in found
    )
    holding = sum(finding.holds is True for finding in found)
    return (
        f"<details{' open' * opened}><summary><b>{escaped(part.title)}</b>"
        f'<span class="signs" aria-hidden="true">{signs}</span>'
        f'<span class="hidden-text">{holding} of {len(found)} hold</span></summary>'
        "<table><thead><tr>"
        + "".join(
            f'<th scope="col">{heading}</th>'
            for heading in ("Statement", "Here", "Evidence")
        )
        + f"</tr></thead><tbody>{rows}</tbody></table>"
        f'<p><a href="#{escaped(part.key)}">'
        f"{escaped(part.exhibit.paper or 'Its tables')}</a></p></details>"
    )


def _setting(report: PaperReport) -> str:
    names = ("model", "device", "date", "versions")
    known: Facts = {name: _distinct(report, name) for name in names}
    pairs = "".join(
        f"<dt>{name}</dt><dd>{escaped('; '.join(values))}</dd>"
        for name, values in known.items()
        if values
    )
    exhibits = [part.exhibit for part in report.parts]
    runs = "".join(
        f"<li>{escaped(words)}</li>" for words in setting.sentences(exhibits)
    )
    if not pairs and not runs:
        return ""
    return (
        '<h3 class="spaced">What was run</h3>'
        + (f'<ul class="notes runs">{runs}</ul>' if runs else "")
        + f'<dl class="pairs">{pairs}</dl>' * bool(pairs)
    )
