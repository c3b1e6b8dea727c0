"""Every number of `printed.py` agrees with the text of the paper or of its rebuttal.

The two documents are not part of the project. The tests run where a folder above the
checkout holds them in `shared/seeds/`, and are skipped elsewhere.
"""

import functools
import pathlib
import re

import pytest

from bpd_jax.studies.study_config import ALPHAS
from experiments import printed

PAPER, REBUTTAL = "002_paper.txt", "003_reviews_and_rebuttal.txt"
NAMES = {
    "lambada": "LAMBADA",
    "squad": "SQuAD",
    "cnn_dailymail": "CNN/Daily",
    "samsum": "SAMS",
    "multi_news": "MultiNews",
    "xsum": "XSUM",
    "newsroom": "NewsRoom",
}


def _folder() -> pathlib.Path | None:
    for folder in pathlib.Path(__file__).resolve().parents:
        if (folder / "shared" / "seeds" / PAPER).is_file():
            return folder / "shared" / "seeds"
    return None


SEEDS = _folder()
pytestmark = pytest.mark.skipif(SEEDS is None, reason="needs ../shared/seeds")


@functools.cache
def text_of(name: str) -> str:
    assert SEEDS is not None
    return (SEEDS / name).read_text(encoding="utf-8")


def lines_between(begin: str, end: str, name: str = PAPER) -> list[str]:
    text = text_of(name)
    start = text.index(begin)
    return text[start : text.index(end, start)].splitlines()


def values(text: str) -> list[float]:
    """Numbers outside brackets; K and M stand for thousands and millions."""
    text = re.sub(r"\[\d+\]|\(\D*[\d.]+\D*\)|SQuAD V1|\\[a-z]+|</?[a-zA-Z]>", " ", text)
    numbers = re.findall(r"(?<![\w-])(\d[\d,]*(?:\.\d+)?)([KM]?)(?!\w)", text)
    scale = {"": 1, "K": 1e3, "M": 1e6}
    return [float(number.replace(",", "")) * scale[unit] for number, unit in numbers]


def percentages(text: str) -> list[float]:
    """Relative gains, which stand in parentheses."""
    text = re.sub(r"</?b>|\s|\\", "", text)
    return [float(gain) for gain in re.findall(r"\(([+-]?[\d.]+)%\)", text)]


def rows_of(lines: list[str]) -> list[tuple[list[str], str]]:
    """Lines of a table, each with its tasks: one, or the several of a group."""
    rows = []
    for line in lines:
        tasks = [task for task, name in NAMES.items() if name in line]
        tasks.sort(key=lambda task: line.index(NAMES[task]))
        if tasks and "\t" in line and values(line):
            rows.append((tasks, line))
    return rows


# Numbers of the printed table, where it begins and ends in the text, its columns.
TABLES = {
    "1": ("TABLE1", "Table 1: Per-task", "Table 2:", ("quality", "bpd")),
    "3": (
        "TABLE3",
        "Table 3: Consecutive",
        "#### 6.2",
        ("repeated_before", "repeated_after", "run_before", "run_after"),
    ),
    "5": (
        "TABLE5",
        "Table 5: Wins",
        "Note that in the tasks",
        (
            "ties",
            "wins",
            "wins_repair",
            "wins_regress",
            "losses",
            "losses_repair",
            "losses_regress",
        ),
    ),
    "7": (
        "TABLE7",
        "In-domain\tC4",
        "Table 7: Block",
        ("ngram_general", "ngram_in_domain", "neural_general", "neural_in_domain"),
    ),
    "8": ("TABLE8", "Table 8: Tuned", "# F Local", ("neural", "ngram")),
    "9": (
        "TABLE4",
        "Table 9: Block",
        "k=16). While",
        ("bpd", "2g", "3g", "4g", "32M", "61M", "94M", "oracle2", "oracle16"),
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_tables_of_tasks(table):
    name, begin, end, columns = TABLES[table]
    numbers = getattr(printed, name)
    tasks_seen = []
    for tasks, line in rows_of(lines_between(begin, end)):
        tasks_seen += tasks
        # Lines of a group go column by column.
        expected = [numbers[task][column] for column in columns for task in tasks]
        assert values(line) == pytest.approx(expected), line
    assert sorted(tasks_seen) == sorted(numbers)


# Columns with a value, and with a gain over BPD, in each field of a line of Table 4.
TABLE4_FIELDS = (
    (("bpd",), ()),
    (("61M",), ("61M",)),
    (("4g", "16x0g", "16x4g"), ("4g", "16x0g")),
    (("oracle16",), ("16x4g",)),
)


def test_table_4():
    tasks_seen = []
    for tasks, line in rows_of(lines_between("Table 4: Block", "#### 7.1")):
        tasks_seen += tasks
        cells = {task: dict(printed.TABLE4[task]) for task in tasks}
        if "lambada" in tasks:
            cells["lambada"]["61M"] = printed.LAMBADA_61M_TABLE4
        fields = line.split("\t")[2:]
        # A field has the columns of one task of the group after those of another.
        for field, (columns, gained) in zip(fields, TABLE4_FIELDS, strict=True):
            assert values(field) == [cells[t][c] for t in tasks for c in columns], field
            gains = [
                100 * (cells[task][column] / cells[task]["bpd"] - 1)
                for task in tasks
                for column in gained
            ]
            # Some gains were computed before block efficiencies were rounded.
            assert percentages(field) == pytest.approx(gains, abs=0.3), field
    assert sorted(tasks_seen) == sorted(printed.TASKS)


def test_table_10():
    tasks_seen = []
    for tasks, line in rows_of(lines_between("Table 10: Test", "# H Practical")):
        tasks_seen += tasks
        expected = [printed.TABLE1[task]["quality"] for task in tasks]
        expected += [printed.TABLE10[t][heads] for heads in "369" for t in tasks]
        assert values(line) == pytest.approx(expected), line
    assert sorted(tasks_seen) == sorted(printed.TASKS)


def test_table_6():
    rows = lines_between("Table 6: Architecture", "Each neural rescoring")
    [large] = [line for line in rows if line.startswith("Blockwise Parallel Decoder")]
    [small] = [line for line in rows if line.startswith("Autoregressive Decoder")]
    columns = ("layers", "embedding", "hidden")
    assert values(large)[-3:] == [printed.TABLE6["1.5B"][c] for c in columns]
    assert values(small)[-9:] == [
        printed.TABLE6[model][column]
        for column in columns
        for model in ("32M", "61M", "94M")
    ]


def test_table_11():
    lines = lines_between("Component\tAuto", "**Memory bandwidth and compute")
    lines = [line for line in lines[1:] if line.strip()]
    columns = list(next(iter(printed.TABLE11.values())))
    assert len(lines) == len(columns) == 7
    for line, column in zip(lines, columns, strict=True):
        expected = [cells[column] for cells in printed.TABLE11.values()]
        assert values(line.partition("\t")[2]) == expected


def test_tables_12_and_13():
    cells = {
        tuple(values(line)[:-1]): values(line)[-1]
        for line in lines_between("# Shortest Paths", "The benchmarks highlight")
        if re.match(r"\d+\t", line)
    }
    expected = {(n,): value for n, value in printed.TABLE12.items()}
    expected |= {
        (steps, k): value
        for steps, row in printed.TABLE13.items()
        for k, value in row.items()
    }
    assert cells == expected


def test_figures_and_alphas():
    text = text_of(PAPER)
    bars = {
        "block_efficiency": r"enhance block efficiency, with .* by up to \+([\d.]+)%",
        "kv_cache": r"reducing key-value \(KV\) cache I/O by (-[\d.]+)%",
        "flops": r"additionally using FLOPs per token by \+([\d.]+)%",
    }
    found = {bar: re.findall(sentence, text) for bar, sentence in bars.items()}
    assert {bar: [value] for bar, value in printed.FIGURE2.items()} == {
        bar: [*map(float, numbers)] for bar, numbers in found.items()
    }
    assert re.findall(r"R-value of (\d\.\d+)", text) == [
        str(printed.FIGURE3_CORRELATION)
    ]
    grid = re.search(r"alpha \\in \\{(.*?)\\}", text)
    assert grid is not None
    assert tuple(values(grid[1])) == ALPHAS


def test_table_e():
    lines = lines_between("NVIDIA A100 GPU", "References", REBUTTAL)
    names = ("Sps", "Lookahead", "PLD", "BPD", "+ Our", "Medusa", "+ Our")
    rows = [line for line in lines if line.startswith(names)]
    for method, name, line in zip(printed.TABLE_E_METHODS, names, rows, strict=True):
        # Columns are not separated; each is a digit, a point and three digits.
        label = re.escape(name) + r"[a-z ]*(\[\d\])?"
        numbers = re.findall(r"\d\.\d{3}", re.sub(label, "", line, count=1))
        expected = [
            table[method][task]
            for table in printed.TABLE_E.values()
            for task in printed.TABLE_E_TASKS
        ]
        assert [*map(float, numbers)] == expected
