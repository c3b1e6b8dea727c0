"""The table of runs on the studies' page: models, numbers of texts, and lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Row, Table

_SETTINGS = {
    "max_new_tokens": "new tokens ≤",
    "longest_prompt": "prompt, truncated ≤",
    "longest_whole": "prompt, whole ≤",
    "lattice_width": "candidates",
}
_Counts = dict[str, Mapping[str, int]]


def run_table(exhibits: Sequence[Exhibit]) -> Table | None:
    """One row per size of run; several if the studies of a size differ.

    Returns:
      None if no exhibit has facts of a run.
    """
    # A row has the texts of all studies with its settings, by task.
    rows: list[tuple[tuple[Any, ...], _Counts, list[str]]] = []
    for exhibit in exhibits:
        facts = exhibit.facts
        counts: _Counts = facts.get("examples") or {}
        settings = facts.get("settings") or {}
        if not counts:
            continue
        common = (
            facts.get("size") or exhibit.title,
            facts.get("model"),
            facts.get("trunk"),
            "block drafter" if settings.get("source") == "block" else "heads",
            facts.get("heads"),
            *map(settings.get, _SETTINGS),
        )
        for key, known, titles in rows:
            if key == common and all(
                counts[t] == known.get(t, counts[t]) for t in counts
            ):
                known.update(counts)
                titles.append(exhibit.paper or exhibit.title)
                break
        else:
            rows.append((common, {**counts}, [exhibit.paper or exhibit.title]))
    if not rows:
        return None
    return Table(
        "runs",
        "Runs",
        "Size",
        [
            *(Column(label) for label in ("studies", "model", "trunk", "drafts of")),
            Column("L", digits=0),
            Column("reported", "texts", digits=0),
            Column("tuning", "texts", digits=0),
            Column("tasks", "texts", digits=0),
            *(Column(label, "tokens", digits=0) for label in _SETTINGS.values()),
        ],
        [
            _row(*row, among=[key[0] for key, *_ in rows[:n]])
            for n, row in enumerate(rows)
        ],
        "Studies: the other rows of a size name theirs. Texts are drawn with a fixed "
        "random seed; the documents of prompts are truncated, or texts are whole. "
        "Candidates are those of each position.",
    )


def _row(
    common: tuple[Any, ...], counts: _Counts, titles: list[str], *, among: list[Any]
) -> Row:
    size, model, trunk, source, length, *settings = common
    # All rows of a size but the first one name their studies.
    studies = ", ".join(titles) if size in among else str(len(titles))
    numbers = (
        length,
        sum(parts.get("report", 0) for parts in counts.values()),
        sum(parts.get("tune", 0) for parts in counts.values()),
        len(counts),
        *settings,
    )
    return Row(
        str(size),
        [
            *(Cell(text=str(text or "")) for text in (studies, model, trunk, source)),
            *(Cell(number) for number in numbers),
        ],
    )
