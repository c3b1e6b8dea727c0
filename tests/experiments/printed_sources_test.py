"""Every number of `printed.py` agrees with the text of the paper or of its rebuttal.

The two documents are not part of the project. The tests run where a folder above the
checkout holds them in `shared/seeds/`, and are skipped elsewhere.
"""

import pathlib
import re

import pytest

from bpd_jax.studies.study_config import ALPHAS
from experiments import printed
from experiments.table5.study import COUNTS

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
FOLDERS = [f / "shared" / "seeds" for f in pathlib.Path(__file__).resolve().parents]
SEEDS = next((folder for folder in FOLDERS if (folder / PAPER).is_file()), None)
pytestmark = pytest.mark.skipif(SEEDS is None, reason="needs ../shared/seeds")


def lines_between(begin: str, end: str, name: str = PAPER) -> list[str]:
    text = (SEEDS / name).read_text(encoding="utf-8")
    start = text.index(begin)
    return text[start : text.index(end, start)].splitlines()


def values(text: str) -> list[float]:
    """Numbers outside brackets; K and M stand for thousands and millions."""
    text = re.sub(r"\[\d+\]|\(\D*[\d.]+\D*\)|SQuAD V1|\\[a-z]+|</?[a-zA-Z]>", " ", text)
    numbers = re.findall(r"(?<![\w-])(\d[\d,]*(?:\.\d+)?)([KM]?)(?!\w)", text)
    scale = {"": 1, "K": 1e3, "M": 1e6}
    return [float(number.replace(",", "")) * scale[unit] for number, unit in numbers]


def rows_of(lines: list[str]) -> list[tuple[list[str], str]]:
    """Lines of a table, each with its tasks: one, or the several of a group."""
    rows = []
    for line in lines:
        tasks = [task for task, name in NAMES.items() if name in line]
        tasks.sort(key=lambda task: line.index(NAMES[task]))
        if tasks and "\t" in line and values(line):
            rows.append((tasks, line))
    return rows


REPEATED = ["repeated_before", "repeated_after", "run_before", "run_after"]
MODELS = ["ngram_general", "ngram_in_domain", "neural_general", "neural_in_domain"]
# The paper does not print how often positions without a change are repaired.
PRINTED = [name for name in COUNTS if name != "ties_repair"]
# Numbers of the printed table, where it begins and ends in the text, its columns.
TABLES = {
    "1": ("TABLE1", "Table 1: Per-task", "Table 2:", ["quality", "bpd"]),
    "3": ("TABLE3", "Table 3: Consecutive", "#### 6.2", REPEATED),
    "5": ("TABLE5", "Table 5: Wins", "Note that in the tasks", PRINTED),
    "7": ("TABLE7", "In-domain\tC4", "Table 7: Block", MODELS),
    "8": ("TABLE8", "Table 8: Tuned", "# F Local", ["neural", "ngram"]),
    "9": (
        "TABLE4",
        "Table 9: Block",
        "k=16). While",
        ["bpd", "2g", "3g", "4g", "32M", "61M", "94M", "oracle2", "oracle16"],
    ),
    "10": ("TABLE10", "Table 10: Test", "# H Practical", ["quality", *"369"]),
}


@pytest.mark.parametrize("table", TABLES)
def test_tables_of_tasks(table):
    name, begin, end, columns = TABLES[table]
    numbers = getattr(printed, name)
    if table == "10":
        numbers = {task: printed.TABLE1[task] | row for task, row in numbers.items()}
    tasks_seen = []
    for tasks, line in rows_of(lines_between(begin, end)):
        tasks_seen += tasks
        # Lines of a group go column by column.
        expected = [numbers[task][column] for column in columns for task in tasks]
        assert values(line) == pytest.approx(expected), line
    assert sorted(tasks_seen) == sorted(numbers)


# The columns of each field of a line of Table 4.
TABLE4_FIELDS = (("bpd",), ("61M",), ("4g", "16x0g", "16x4g"), ("oracle16",))


def test_table_4():
    cells = {task: dict(row) for task, row in printed.TABLE4.items()}
    cells["lambada"]["61M"] = printed.LAMBADA_61M_TABLE4
    rows = rows_of(lines_between("Table 4: Block", "#### 7.1"))
    assert sorted(task for tasks, _ in rows for task in tasks) == sorted(cells)
    for tasks, line in rows:
        # A field has the columns of one task of the group after those of another.
        for field, columns in zip(line.split("\t")[2:], TABLE4_FIELDS, strict=True):
            assert values(field) == [cells[t][c] for t in tasks for c in columns], field


def test_tables_of_models_and_times():
    lines = lines_between("Component\tAuto", "**Memory bandwidth and compute")
    lines = [line for line in lines[1:] if line.strip()]
    columns = zip(*(cells.values() for cells in printed.TABLE11.values()), strict=True)
    assert [values(line.partition("\t")[2]) for line in lines] == [*map(list, columns)]
    rows = lines_between("Table 6: Architecture", "Each neural rescoring")
    [small] = [line for line in rows if line.startswith("Autoregressive Decoder")]
    models = [printed.TABLE6[model] for model in ("32M", "61M", "94M")]
    columns = ("layers", "embedding", "hidden")
    expected = [model[column] for column in columns for model in models]
    assert values(small)[-9:] == expected
    cells = {
        tuple(values(line)[:-1]): values(line)[-1]
        for line in lines_between("# Shortest Paths", "The benchmarks highlight")
        if re.match(r"\d+\t", line)
    }
    table13 = printed.TABLE13.items()
    expected = {(steps, k): value for steps, row in table13 for k, value in row.items()}
    assert cells == {(n,): value for n, value in printed.TABLE12.items()} | expected


def test_figures_and_alphas():
    text = (SEEDS / PAPER).read_text(encoding="utf-8")
    for bar, sentence in {
        "block_efficiency": r"enhance block efficiency, with .* by up to \+([\d.]+)%",
        "kv_cache": r"reducing key-value \(KV\) cache I/O by (-[\d.]+)%",
        "flops": r"additionally using FLOPs per token by \+([\d.]+)%",
    }.items():
        assert [*map(float, re.findall(sentence, text))] == [printed.FIGURE2[bar]]
    correlation = re.findall(r"R-value of (\d\.\d+)", text)
    assert correlation == [str(printed.FIGURE3_CORRELATION)]
    [grid] = re.findall(r"alpha \\in \\{(.*?)\\}", text)
    assert tuple(values(grid)) == ALPHAS


def test_table_e():
    lines = lines_between("NVIDIA A100 GPU", "References", REBUTTAL)
    names = ("Sps", "Lookahead", "PLD", "BPD", "+ Our", "Medusa", "+ Our")
    rows = [line for line in lines if line.startswith(names)]
    for method, name, line in zip(printed.TABLE_E_METHODS, names, rows, strict=True):
        # Columns are not separated; each is a digit, a point and three digits.
        label = re.escape(name) + r"[a-z ]*(\[\d\])?"
        numbers = re.findall(r"\d\.\d{3}", re.sub(label, "", line, count=1))
        tables = [table[method] for table in printed.TABLE_E.values()]
        expected = [row[task] for row in tables for task in printed.TABLE_E_TASKS]
        assert [*map(float, numbers)] == expected
