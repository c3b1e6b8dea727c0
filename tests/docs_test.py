"""Code in docs/ and in docstrings runs as printed; numbers on pages are recorded."""

import doctest
import importlib
import json
import pathlib
import re
import shlex
import shutil

import pytest

from bpd_jax.decoding.aliases import ALIASES
from bpd_jax.decoding.options import ACCEPTANCES, VERIFICATIONS
from bpd_jax.drafting.parts import RefinerPart, SourcePart, StandalonePart, parts
from bpd_jax.studies.run_files import read_records
from bpd_jax.studies.study_records import REPORT, DraftRecord
from bpd_jax.studies.tasks import PAPER_TASKS
from tests.commands import python, succeed

ROOT = pathlib.Path(__file__).parent.parent
# Entry points are left out: two of them in one process define the same flags.
ENTRY_POINTS = [
    file
    for file in ROOT.glob("bpd_jax/*.py")
    if re.search(r"= flags\.DEFINE_|cli\.(define_flags|run)\(", file.read_text())
]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "bpd_jax").rglob("*.py"))
    if ">>> " in file.read_text() and file not in ENTRY_POINTS
]
NGRAMS, DECODING = ROOT / "docs" / "ngrams.md", ROOT / "docs" / "decoding.md"
REPRODUCTION = ROOT / "docs" / "reproduction.md"


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def run(folder: pathlib.Path, *arguments: str) -> str:
    result = python(*arguments, folder=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.exhaustive
def test_the_tour_of_ngrams_runs(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorflow")
    (command,) = blocks(NGRAMS, "bash")
    arguments = shlex.split(command.replace("\\\n", "").partition("\npython ")[2])
    assert arguments[:2] == ["-m", "bpd_jax.build_ngram"]
    built = succeed("bpd_jax.build_ngram", *arguments[2:], folder=tmp_path)
    assert "before pruning" in built.stdout
    printed = run(tmp_path, "-c", "\n".join(blocks(NGRAMS, "python")))
    scores = [float(score) for score in re.findall(r"^refined +(\S+)", printed, re.M)]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    html = (tmp_path / "runs" / "tour" / "lattice.html").read_text()
    assert html.count('class="path"') == 4  # two in the legend, two in the picture


@pytest.mark.exhaustive
def test_the_tour_of_decoding_runs(trained: pathlib.Path, tmp_path: pathlib.Path):
    """On a model that trains in seconds, instead of the one of `make demo`."""
    shutil.copytree(trained / "run", tmp_path / "runs" / "demo")
    printed = run(tmp_path, "-c", "\n".join(blocks(DECODING, "python")))
    replayed = re.findall(r"^ngram:4:alpha=\S+ +(\S+) tokens per", printed, re.M)
    assert len(replayed) == 4
    assert all(float(efficiency) >= 1 for efficiency in replayed)
    assert re.search(r"^(greedy: no method is|\S+, \S+ times as fast)", printed, re.M)
    assert "same texts: True" in printed


def test_the_tour_of_decoding_names_every_method() -> None:
    text = DECODING.read_text()
    _, methods, rest = re.split(r"^## 3\..*|^## 4\..*", text, flags=re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)[:`]", methods, re.MULTILINE)
    engines = {"ngram_viterbi", "ngram_fst"}  # They share a row.
    assert set(rows) == {*parts(), *ALIASES, "auto"} - engines
    for part in parts().values():
        if issubclass(part, (SourcePart, StandalonePart, RefinerPart)):
            assert part.reference in methods
    for name in ACCEPTANCES:
        assert f"\n| `{name}` | " in rest
    for layout in VERIFICATIONS:
        assert f'"{layout}"' in rest
    for command in " ".join(blocks(DECODING, "bash")).split("python -m ")[1:]:
        assert command.startswith("bpd_jax.decode --")


def test_tests_that_are_named_exist() -> None:
    """In docs, README and SECURITY.md: the file, and the function after `::`."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    missing = []
    for page in pages:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
        for file, function in named:
            path = ROOT / file
            source = path.read_text() if path.is_file() else ""
            if not source or (function and f"def {function}(" not in source):
                missing.append(f"{page.name}: {file}::{function}")
    assert missing == []


def test_pages_have_the_block_efficiencies_of_the_committed_records() -> None:
    """Rows of 168 texts are of the paper's tasks."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    for size, label, texts, ngram, neural in (
        (
            "smollm2",
            "rescorers of general English, 303 texts of 13 tasks",
            303,
            "@general_4",
            "@general_neural",
        ),
        ("smollm2", "among them, 168 texts", 168, "@general_4", "@general_neural"),
        ("smollm2_heads", "168 texts of seven tasks", 168, "@own_4", "@own"),
        ("small", "168 texts of seven tasks", 168, "@4gram", "@deep"),
        ("small_sampled", "at temperature 0.7, 168 texts", 168, "@4gram", "@deep"),
    ):
        drafts = [
            record
            for record in read_records(
                ROOT / "experiments" / "table4" / "results" / size
            )
            if isinstance(record, DraftRecord) and record.part == REPORT
        ]
        cells = []
        for contender in (
            "bpd",
            f"ngram:1{ngram}",
            f"neural:1{neural}",
            "zero_gram:16",
            f"ngram:16{ngram}",
            "oracle",
        ):
            records = [
                record
                for record in drafts
                if record.contender == contender
                and (texts > 168 or record.task in PAPER_TASKS)
            ]
            assert len(records) == texts
            calls = sum(record.calls for record in records)
            cells.append(f"{sum(record.tokens for record in records) / calls:.2f}")
        assert " | ".join([label, *cells]) in REPRODUCTION.read_text()
        if size == "smollm2_heads":
            bpd, best, neural_best, _, best_16, oracle = cells
            assert (
                f"BPD {bpd} tokens per call, one draft under 4-grams {best}, after a "
                f"neural rescorer {neural_best}, 16 drafts under 4-grams {best_16}, "
                f"the oracle {oracle}"
            ) in readme


# A number with the unit of a measurement, and what it can rest on.
MEASURED = re.compile(
    r"\d\s(?:tokens\sper\s(?:serial\s)?call|times\sas\sfast|ms\b|tokens\sper\ssecond"
    r"|percentage\spoints|nats\b)|\d\.\d\s%|\d\.\d+\stokens"
)
RECORD = re.compile(r"\]\([^)]*(?:/results|/logs|\.json|printed\.py)[^)]*\)")
SOURCE = re.compile(
    RECORD.pattern + r"|python\s-m\s|`make [a-z-]+`|\.sh\b|`[\w/]+\.json`"
    r"|`tests/[\w/]+\.py`"
)
RESULTS = ("README.md", "docs/reproduction.md", "docs/tutorials/covering_drafts.md")


def test_sections_with_measured_numbers_name_a_record_or_a_command() -> None:
    """By section, between two headings: which number is whose is left to the reader."""
    missing = [
        f"{page.relative_to(ROOT)}: {section.splitlines()[0]}"
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for section in re.split(r"^(?=#{1,4} )", page.read_text(), flags=re.MULTILINE)
        if MEASURED.search(section) and not SOURCE.search(section)
    ]
    assert missing == []


@pytest.mark.parametrize("page", RESULTS)
def test_paragraphs_with_measured_results_name_a_record_or_a_command(page: str) -> None:
    """Items and rows of a table may rest on the paragraph before them.

    All of a section may rest on a record in its first paragraph.
    """
    missing = []
    for section in re.split(r"^(?=#{1,4} )", (ROOT / page).read_text(), flags=re.M):
        _, *blocks = re.split(r"\n\n+|\n(?=- |\| )", section)
        cited = bool(blocks and RECORD.search(blocks[0]))
        before = False
        for block in blocks:
            own = bool(SOURCE.search(block))
            listed = re.match(r"\s*(- |\|)", block)
            if MEASURED.search(block) and not (own or cited or (listed and before)):
                missing.append(block[:70])
            before = before if listed else own
    assert missing == []


def test_notes_on_the_models_of_a_size_agree() -> None:
    """Two notes that begin alike are the same, or one of them is out of date."""
    notes: dict[tuple[str, str], set[str]] = {}
    for file in (ROOT / "experiments").glob("*/results/*/study.json"):
        for note in json.loads(file.read_text())["notes"]:
            notes.setdefault((file.parent.name, note[:40]), set()).add(note)
    assert [key for key, different in notes.items() if len(different) > 1] == []


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_give_the_printed_results(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
