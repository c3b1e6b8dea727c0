"""Writes a page from the results of studies; exports their tables and charts.

    python -m bpd_jax.report experiments --output=report.html

The arguments are folders of results (`study.json` with its records), or folders that
contain such folders. The page is self-contained and works offline and on a phone.

    python -m bpd_jax.report experiments --picture=docs/images/drafts.svg

--picture draws the block in which a refined draft gains most over the unrefined one.
"""

import dataclasses
import importlib
import pathlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from absl import flags

from bpd_jax.base import cli, provenance
from bpd_jax.base.errors import UserError
from bpd_jax.reporting import draft_picture
from bpd_jax.reporting.charts import has_points, standalone
from bpd_jax.reporting.explorer import ExplorerText, title_of
from bpd_jax.reporting.page import Page, PagePart, write_page
from bpd_jax.reporting.table_files import table_csv, table_latex
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.run_files import HEADER, open_run
from bpd_jax.studies.study import readable
from bpd_jax.studies.study_records import ExplorerRecord

OUTPUT = cli.DEFINE_path("output", "report.html", "file of the page.")
LATEX = cli.DEFINE_path("latex", None, "folder for one .tex file per table.")
CSV = cli.DEFINE_path("csv", None, "folder for one .csv file per table.")
SVG = cli.DEFINE_path("svg", None, "folder for one .svg file per chart.")
PICTURE = cli.DEFINE_path(
    "picture", None, "SVG file of one block with its plain and its refined draft."
)
TITLE = flags.DEFINE_string(
    "title", "Drafts in blockwise parallel decoding", "title of the page."
)

_DEPTH = 3


def main(folders: Sequence[str]) -> None:
    """Computes the exhibits of all studies and writes the page and files."""
    if not folders:
        raise UserError(
            "no folder of results is given: python -m bpd_jax.report experiments "
            "--output=report.html."
        )
    files.check_writable(OUTPUT.value)
    for folder in _folders():
        files.check_writable(folder, folder=True)
    if PICTURE.value:
        files.check_writable(PICTURE.value)
    catalog, key_figures = _tables()
    runs = _runs(folders, catalog)
    parts = _parts(runs, catalog)
    # Of which study the damage is, its exhibit would have said.
    with readable("texts of these studies", "run each alone to see which"):
        report = Page(
            title=TITLE.value,
            created=provenance.today(),
            parts=parts,
            figures=key_figures.highlights(runs),
            texts=_texts(runs),
        )
        drawn, picture = PICTURE.value, None
        if drawn:
            picture = draft_picture.largest_gain(report.texts)
    write_page(report, OUTPUT.value)
    print(f"report: {OUTPUT.value} ({len(parts)} studies)")
    _write_files(parts)
    if drawn and picture is not None:
        files.write_text(drawn, draft_picture.svg(picture))
        print(f"picture: {drawn} ({picture.text.key}, token {picture.at})")


def _runs(folders: Sequence[str], catalog: Any) -> list[StudyRun]:
    """All runs in or below some folders, in the order of the catalog."""
    run_folders: dict[pathlib.Path, None] = {}
    for folder in folders:
        path = as_path(folder)
        if not path.is_dir():
            raise UserError(f"{folder} is not a folder.")
        below = {
            header.parent.resolve()
            for depth in range(_DEPTH + 1)
            for header in path.glob("*/" * depth + HEADER)
            if not any(name.startswith(".") for name in header.relative_to(path).parts)
        }
        if not below:
            raise UserError(
                f"{folder} contains no results of a study (a {HEADER}), nor does any "
                f"folder up to {_DEPTH} levels below it."
            )
        run_folders |= dict.fromkeys(sorted(below))
    runs = [open_run(folder) for folder in run_folders]
    for run in runs:
        catalog.find_study(run.study)
    order = list(catalog.STUDIES)
    return sorted(runs, key=lambda run: order.index(run.study))


def _tables() -> tuple[Any, Any]:
    """The modules of experiments/ with the code of the tables, and of the key figures.

    They are beside the package in a checkout, and not part of a wheel.
    """
    root = pathlib.Path(__file__).parents[1]
    if not (root / "experiments" / "catalog.py").is_file():
        raise UserError(
            "the code of the paper's tables is not part of an installed package: run "
            "python -m bpd_jax.report in a checkout of bpd_jax."
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return (
        importlib.import_module("experiments.catalog"),
        importlib.import_module("experiments.highlights"),
    )


def _parts(runs: Sequence[StudyRun], catalog: Any) -> list[PagePart]:
    """The exhibits; those of one study are distinguished by size, then by number."""
    counts = Counter(run.study for run in runs)
    parts: list[PagePart] = []
    for run in runs:
        size = _size(run) if counts[run.study] > 1 else ""
        key = base_key = f"{run.study}_{size}" if size else run.study
        number = 1
        while key in {part.key for part in parts}:
            number += 1
            key = f"{base_key}_{number}"
        if number > 1:
            size = f"{size} ({number})"
        exhibit = catalog.find_study(run.study).exhibit(run)
        parts.append(PagePart(key, exhibit, size))
    return parts


def _size(run: StudyRun) -> str:
    return str(run.facts.get("size") or run.folder.name)


def _texts(runs: Sequence[StudyRun]) -> list[ExplorerText]:
    """Texts of the explorer by task, without duplicates within a size."""
    pairs = [(run, records) for run in runs if (records := run.of(ExplorerRecord))]
    several = len({_size(run) for run, _ in pairs}) > 1
    texts: dict[str, ExplorerText] = {}
    for run, records in pairs:
        order = list(run.facts.get("tasks", {}))
        order_of = {name: index for index, name in enumerate(order)}
        for record in sorted(
            records, key=lambda r: (order_of.get(r.task, len(order_of)), r.example)
        ):
            key, group = f"{record.task}/{record.example}", run.task_label(record.task)
            if several:
                key, group = f"{_size(run)}/{key}", f"{group} · {_size(run)}"
            fields = dataclasses.asdict(record)
            del fields["task"], fields["example"]
            fields["traces"] = [t for t in fields["traces"] if t["calls"]]
            if not fields["traces"]:
                continue
            title = title_of(record.prompt, record.example)
            text = ExplorerText(key=key, group=group, title=title, **fields)
            texts.setdefault(key, text)
    return list(texts.values())


def _write_files(parts: Sequence[PagePart]) -> None:
    """Writes tables and charts into the folders of the flags."""
    for part in parts:
        suffix = part.key.removeprefix(part.exhibit.name)
        for table in part.exhibit.tables:
            name = table.name + suffix
            _write(LATEX.value, f"{name}.tex", table_latex(table, name))
            _write(CSV.value, f"{name}.csv", table_csv(table))
        for chart in filter(has_points, part.exhibit.charts):
            _write(SVG.value, f"{chart.name}{suffix}.svg", standalone(chart))
    for folder in _folders():
        print(f"files: {folder}")


def _folders() -> list[str]:
    """The folders for tables and charts."""
    return [folder for folder in (LATEX.value, CSV.value, SVG.value) if folder]


def _write(folder: str | None, name: str, text: str) -> None:
    if folder:
        files.write_text(as_path(folder) / name, text)


if __name__ == "__main__":
    cli.run(main, positional=True)
