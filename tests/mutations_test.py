"""Damaged files of every format are read or refused; see `tests/mutations.py`."""

import gc
import inspect
import json
import pathlib
import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from bpd_jax.base.errors import UserError
from tests import mutations
from tests.mutation_formats import FORMATS
from tests.mutations import Format, mutate, read_damaged

# Formats whose inputs take longer than a few milliseconds.
SLOW = ("checkpoint", "slim", "gguf", "huggingface", "deepspec", "dflash", "specul")
# Imports TensorFlow; see `tests/data/seqio_cache_test.py`.
TENSORFLOW = ("seqio",)


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


def test_crashes_and_readers_that_do_not_end_are_counted() -> None:
    """In a new process: one with the threads of jax must not fork."""
    code = (
        "import os, pathlib\n"
        "from tests import mutations\n"
        f"{inspect.getsource(write)}"
        "def damaged(folder): return b'text' not in (folder / 'a.json').read_bytes()\n"
        "def crash(folder):\n"
        "    if damaged(folder): os.abort()\n"
        "def hang(folder):\n"
        "    while damaged(folder): pass\n"
        "mutations.SECONDS = 1\n"
        "for read, inputs, seed in ((crash, 200, 0), (hang, 3, 2)):\n"
        "    example = mutations.Format(write, read, '*')\n"
        "    print(mutations.run(example, inputs, seed)['failures'])\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        cwd=mutations.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "the process ended with -6" in output
    assert "longer than 1 seconds" in output


def test_inputs_are_determined_by_seed_and_number() -> None:
    data = json.dumps({"numbers": list(range(50))}).encode()
    first, second = (
        [mutate(data, random.Random(f"1 {i}"), "a.json") for i in range(50)]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) > 40
    assert sum(text == data for text in first) < 5


# Orbax does not await the other arrays after one could not be read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "name", [name for name in FORMATS if not name.startswith(TENSORFLOW)]
)
def test_random_damage_is_read_or_refused(name: str) -> None:
    inputs = 10 if name.startswith(SLOW) else 20
    row = read_damaged(FORMATS[name], inputs, 0)
    assert row["failures"] == []
    assert row["read"] + row["refused"] == inputs
    if name == "checkpoint":
        gc.collect()  # The warnings about these reads belong to this test.


LONG = b"a" * 300
LARGEST = b"\xff" * 7 + b"\x7f"  # As a count or size, 2^63 - 1.
# Inputs that ended in a traceback, or did not end.
DIFFICULT: list[tuple[str, str, Callable[[bytes], bytes]]] = [
    ("records.jsonl", "records.jsonl", lambda d: d.replace(b'ed":"', b'ed":"0')),
    ("records.jsonl", "records.jsonl", lambda d: d.replace(b'gth":"', b'gth":"~')),
    ("gin_file", "run.gin", lambda d: d + b"STEPS\n"),
    ("gin_file", "run.gin", lambda d: d + b"STEPS = " + b"[" * 9_000),
    ("gin_flags", "flags.txt", lambda d: d + b"STEPS = " + b"[" * 9_000),
    ("metrics.jsonl", "metrics.jsonl", lambda d: d[:40] + b"\xff" + d[40:]),
    ("metrics.jsonl", "metrics.jsonl", lambda d: b"[" * 100_000),
    ("metrics.jsonl", "metrics.jsonl", lambda d: b"[1]\n" + d),
    ("parts", "parts/parts.json", lambda d: d.replace(b'"file"', b'"%s"' % LONG)),
    ("ngram_model", "keys_1.npy", lambda d: d[:8] + b"\xff\xff" + b" " * 70_000),
    ("gguf", "m.gguf", lambda d: d[:8] + LARGEST + d[16:]),  # tensors
    ("huggingface_safetensors", "model.safetensors", lambda d: LARGEST + d[8:]),
    ("ngram_counts", "followed_1.npy", lambda d: d[:128] + bytes(len(d) - 128)),
]


@pytest.mark.parametrize("name, path, edit", DIFFICULT)
def test_known_difficult_inputs_are_read_or_refused(
    tmp_path: pathlib.Path, name: str, path: str, edit: Callable[[bytes], bytes]
) -> None:
    example, folder = FORMATS[name], tmp_path / "folder"
    folder.mkdir()
    example.make(folder)
    before = (folder / path).read_bytes()
    (folder / path).write_bytes(edit(before))
    assert (folder / path).read_bytes() != before
    if example.reseal is not None:
        example.reseal(folder)
    assert not mutations.attempt(lambda: example.read(folder))


def test_table_in_the_docs_matches_the_results() -> None:
    page = (mutations.ROOT / "docs" / "reliability.md").read_text()
    assert mutations.table(json.loads(mutations.RESULT.read_bytes())) in page


@pytest.mark.exhaustive
def test_many_random_inputs_are_read_or_refused(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "mutations.json"
    result = subprocess.run(
        [sys.executable, "-m", "tests.mutations", f"--output={output}"],
        cwd=mutations.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(output.read_text())["formats"]
    assert set(rows) == set(FORMATS)
    assert all(row["inputs"] >= 2000 for row in rows.values())
    # The reader of metrics skips damaged lines with a warning.
    assert [name for name, row in rows.items() if not row["refused"]] == [
        "metrics.jsonl"
    ]
