"""Damaged files of every format are read or refused; see `tests/mutations.py`."""

import json
import pathlib
import random
import subprocess
import sys

import pytest

from bpd_jax.errors import UserError
from tests import mutations
from tests.mutation_formats import FORMATS
from tests.mutations import Format, mutate, read_damaged

# Of these an input takes longer than a few milliseconds.
SLOW = ("checkpoint", "slim", "gguf", "huggingface", "deepspec", "dflash", "specul")


def write(folder: pathlib.Path) -> None:
    (folder / "a.json").write_text('{"a": [1, 2, 3], "b": "text"}')


@pytest.mark.parametrize(
    "error", [ValueError("x"), RecursionError(), MemoryError(), UserError("two\nlines")]
)
def test_faults_of_a_reader_are_counted(error: Exception) -> None:
    intact = json.loads('{"a": [1, 2, 3], "b": "text"}')

    def read(folder: pathlib.Path) -> None:
        data = (folder / "a.json").read_bytes()
        if data != json.dumps(intact).encode():
            raise error

    row = read_damaged(Format(write, read, "*"), 20, 0)
    assert row["read"] == row["refused"] == 0
    assert len(row["failures"]) == 20


def test_a_crash_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os\n"
        "from tests.mutations import Format, run\n"
        "from tests.mutations_test import write\n"
        "def read(folder):\n"
        "    if b'text' not in (folder / 'a.json').read_bytes(): os.abort()\n"
        "print(run(Format(write, read, '*'), 200, 0)['failures'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=mutations.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the process ended with -6" in done.stdout


def test_an_input_is_determined_by_its_seed_and_number() -> None:
    data = json.dumps({"numbers": list(range(50))}).encode()
    one, two = (
        [mutate(data, random.Random(f"1 {i}"), "a.json") for i in range(50)]
        for _ in range(2)
    )
    assert one == two
    assert len(set(one)) > 40
    assert sum(text == data for text in one) < 5


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if not name.startswith(SLOW)]
)
def test_some_damage_is_one_sentence(name: str) -> None:
    row = read_damaged(FORMATS[name], 20, 1)
    assert row["failures"] == []
    assert row["read"] + row["refused"] == 20


def test_the_table_of_the_docs_is_that_of_the_results() -> None:
    page = (mutations.ROOT / "docs" / "reliability.md").read_text()
    assert mutations.table(json.loads(mutations.RESULT.read_bytes())) in page


@pytest.mark.exhaustive
def test_much_damage_is_one_sentence(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "mutations.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutations", f"--output={output}"],
        cwd=mutations.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())["formats"]
    assert set(rows) == set(FORMATS)
    assert all(row["inputs"] >= 2000 and row["refused"] for row in rows.values())
