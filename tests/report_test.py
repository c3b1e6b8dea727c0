"""The command `bpd_jax.report`."""

import csv
import dataclasses
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

from bpd_jax.studies.run_files import append_records, write_header
from bpd_jax.studies.study_records import (
    REPORT,
    TUNE,
    Call,
    DraftRecord,
    ExplorerRecord,
    OracleRecord,
    Trace,
)
from tests.commands import assert_all_refused, succeed

ROOT = pathlib.Path(__file__).parent.parent
TASKS = {"squad": "SQuAD", "xsum": "XSum"}


def drafts(contender, accepted):
    """One text of each task; every draft has 4 tokens, no two equal."""
    return [
        DraftRecord(
            task, 0, REPORT, contender, accepted, "4" * 8, "0" * 8, "1" * 8, 8,
            [0.5, 1.0, 1.5, 2.0] if contender == "bpd" else [],
        )
        for task in TASKS
    ]  # fmt: skip


def explorer_record():
    """Four tokens `a b c d`, of which the heads predict two correctly."""
    block = [[1, 2], [2, 3], [3, 0]]
    return ExplorerRecord(
        task="squad",
        example=7,
        prompt="What? </script>",
        pieces=["a", " b", "<c>", "d"],
        output=[0, 1, 2, 3],
        candidates=[block] * 4,
        log_probs=[[[-0.5, -1.5]] * 3] * 4,
        traces=[
            Trace("bpd", "BPD", [Call(0, [0, 1, 2, 3], [0, 1, 2, 3], 4, 0)]),
            Trace("ngram:4", "4-best", [Call(0, [0, 2, 2, 3], [0, 1, 2, 3], 4, 1)]),
            Trace("lookahead", "Lookahead", []),
        ],
    )


def write(folder, study, size, records):
    folder.mkdir(parents=True)
    facts = {
        "size": size,
        "command": f"python -m experiments.run {study} --size={size}",
        "date": "2025-01-31",
        "device": "cpu × 1",
        "versions": {"jax": "0.10.2"},
        "model": "SmolLM2",
        "labels": {"bpd": "BPD", "ngram:4": "4-best 4-gram", "oracle": "Oracle"},
        "tasks": TASKS,
    }
    write_header(folder, study, facts)
    append_records(folder, records)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    records = [
        *drafts("bpd", "21212121"),
        *drafts("ngram:4", "43214321"),
        *drafts("oracle", "43214321"),
    ]
    oracle = [
        OracleRecord(task, 0, REPORT, 8, [[8, 6], [5, 3], [4, 2]]) for task in TASKS
    ]
    write(folder / "figure6" / "results" / "tiny", "figure6", "tiny", oracle)
    write(
        folder / "figure4" / "results" / "tiny", "figure4", "tiny", [explorer_record()]
    )
    for size in ("tiny", "smollm2"):
        write(folder / "table4" / "results" / size, "table4", size, records)
    (folder / "table4" / ".old").mkdir()
    (folder / "table4" / ".old" / "study.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def written(results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    result = succeed(
        "bpd_jax.report",
        str(results),
        str(results / "table4"),
        "--output=page/report.html",
        "--latex=tex",
        "--csv=csv",
        "--svg=svg",
        "--title=Of <two> tasks",
        folder=folder,
    )
    assert "report: page/report.html (4 studies)" in result.stdout
    return folder


def test_the_page_has_every_run_once_in_the_order_of_the_catalog(written):
    page = (written / "page" / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'<h2 id="([^"]+)"', page) == [
        "summary",
        "table4_smollm2",
        "table4_tiny",
        "figure4",
        "figure6",
        "explorer-title",
    ]
    assert "<h1>Of &lt;two&gt; tasks</h1>" in page
    assert " · smollm2</h2>" in page
    # 16 tokens in 8 calls without, in 4 with n-grams.
    assert "<dt>BPD, smollm2</dt><dd>2.00</dd>" in page
    assert "<dt>Best of Table 4</dt><dd>4.00</dd>" in page
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page)[1]
    [text] = json.loads(data)
    assert (text["group"], text["title"]) == ("SQuAD", "example 7 · What? </script>")
    # The explorer omits contenders without calls.
    assert [trace["contender"] for trace in text["traces"]] == ["bpd", "ngram:4"]


def test_tables_and_charts_are_files(written):
    with (written / "csv" / "table4_tiny.csv").open(newline="") as stream:
        rows = {row["task"]: row for row in csv.DictReader(stream)}
    assert float(rows["SQuAD"]["BPD"]) == 8 / 4
    text = (written / "tex" / "table4_smollm2.tex").read_text(encoding="utf-8")
    assert "SQuAD & 2.00" in text
    charts = sorted((written / "svg").iterdir())
    assert charts
    for chart in charts:
        ElementTree.fromstring(chart.read_text(encoding="utf-8"))


def test_invalid_results_are_reported(results, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "unknown").mkdir()
    write_header(tmp_path / "unknown", "table44", {})
    # Two and one heads; tasks without labels.
    grids = [[[8, 6], [5, 3]], [[8, 6]]]
    oracle = [OracleRecord("squad", n, REPORT, 8, g) for n, g in enumerate(grids)]
    write(tmp_path / "shapes", "figure6", "tiny", oracle)
    write(tmp_path / "facts", "table4", "tiny", drafts("bpd", "21212121"))
    write_header(tmp_path / "facts", "table4", {"tasks": ["squad"]})
    cases = [
        (["shapes"], "shapes are damaged or do not belong together"),
        (["facts"], "tasks is not of the type dict"),
        (["nowhere"], "nowhere is not a folder"),
        (["empty"], "empty contains no results of a study"),
        (["unknown"], "there is no study 'table44': did you mean table4?"),
        ([str(results), "--output=empty"], "cannot write empty: it is a folder"),
    ]
    assert_all_refused("bpd_jax.report", cases, tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_study_without_reported_texts_is_a_page(tmp_path):
    """Its charts have no points, also on a logarithmic axis."""
    records = [
        dataclasses.replace(record, part=TUNE)
        for name in ("zero_gram:1", "zero_gram:2", "zero_gram:4")
        for record in drafts(name, "21212121")
    ]
    write(tmp_path / "results", "figure7", "tiny", records)
    succeed("bpd_jax.report", "results", "--svg=svg", folder=tmp_path)
    assert "Fewer than three values of p" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "svg").exists()


def test_unwritable_folders_are_refused_first(results, tmp_path):
    (tmp_path / "taken").write_text("mine")
    flags = ["--latex=files/latex", "--csv=files/csv", "--svg=taken"]
    cases = [([str(results), *flags], "write taken: it is a file; name a folder.")]
    assert_all_refused("bpd_jax.report", cases, tmp_path)
    assert not any(path.is_file() for path in (tmp_path / "files").rglob("*"))
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "taken").read_text() == "mine"


def test_picture_in_the_docs_matches_the_committed_records(tmp_path):
    picture = tmp_path / "drafts.svg"
    figure = str(ROOT / "experiments" / "figure4")
    succeed("bpd_jax.report", figure, f"--picture={picture}", folder=tmp_path)
    committed = ROOT / "docs" / "images" / "drafts.svg"
    assert picture.read_text() == committed.read_text()
