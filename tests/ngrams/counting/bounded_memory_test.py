import functools
import json
import pathlib

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting import bounded_memory, sorted_runs
from bpd_jax.ngrams.counting import counts as counts_module
from bpd_jax.ngrams.counting.counts import count_ngrams, with_min_counts
from bpd_jax.storage import files
from tests.ngrams.helpers import Sequences, assert_same

MANIFEST = sorted_runs.KIND.marker
MEMORY = 1_000_000  # about 12 runs of the text below
V = 300
count = functools.partial(bounded_memory.count, order=4, memory=MEMORY)
count_to_folder = functools.partial(
    bounded_memory.count_to_folder, order=4, memory=MEMORY
)
Batches = functools.partial(Sequences, vocab_size=V)


@pytest.fixture(scope="module")
def text():
    """1,200 sequences with repeated patterns, 240,000 tokens."""
    rng = np.random.default_rng(3)
    return [
        np.minimum(rng.geometric(0.05, size=rng.integers(0, 400)) - 1, V - 1)
        for _ in range(1200)
    ]


@pytest.fixture(scope="module")
def expected(text):
    return count_ngrams(text, order=4, vocab_size=V)


@pytest.mark.parametrize("memory, with_runs", [(MEMORY, True), (10**9, False)])
def test_counts_do_not_depend_on_memory(tmp_path, text, expected, memory, with_runs):
    counts = count(Batches(text), tmp_path / "work", memory=memory)
    assert_same(counts, expected)
    assert counts.seen == expected.seen
    assert (len(list(tmp_path.glob("work/run_*.windows"))) >= 2) == with_runs


@pytest.mark.parametrize("order", [1, 9])
def test_runs_of_all_orders_are_merged(tmp_path, text, order):
    counts = count(Batches(text), tmp_path, order=order)
    assert_same(counts, count_ngrams(text, order=order, vocab_size=V))


@pytest.mark.parametrize("minimums", [(1, 4, 2, 3), (1, 1, 1, 99)])
def test_min_counts_match_their_definition(tmp_path, text, expected, minimums):
    counts = count(Batches(text), tmp_path, min_counts=minimums)
    assert_same(counts, with_min_counts(expected, minimums))
    assert counts.seen == expected.sizes


def test_killed_count_resumes_after_its_last_run(tmp_path, text, expected):
    with pytest.raises(KeyboardInterrupt):
        count(Batches(text, fail_after=800), tmp_path)
    assert list(tmp_path.glob("run_*"))
    # A run that is not in the manifest.
    (tmp_path / "run_00099.windows").write_bytes(b"half")
    resumed = Batches(text)
    counts = count(resumed, tmp_path, memory=3 * MEMORY)
    assert_same(counts, expected)
    assert 0 < resumed.read_from[0] <= 800
    # Other minimum counts of a complete count do not read the source.
    third = Batches(text)
    fewer = count(third, tmp_path, min_counts=(1, 2, 2, 2))
    assert_same(fewer, with_min_counts(expected, (1, 2, 2, 2)))
    assert third.read_from == []
    # The first arrays, which may be those of another process, are still the same.
    assert_same(counts, expected)


def test_runs_of_another_count_are_refused_and_unchanged(tmp_path, text):
    count(Batches(text), tmp_path, order=3)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="another count, with order = 3 and not 4"):
        count(Batches(text), tmp_path)
    with pytest.raises(UserError, match="another count, with source = 1200 seq"):
        count(Batches(text[1:]), tmp_path, order=3)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis\.txt.* new folder"):
        count(Batches(text), tmp_path, order=3)


def test_damaged_run_is_detected(tmp_path, text):
    count(Batches(text), tmp_path, order=2)
    for name in ("run_00002.windows", "run_00002.counts"):
        path = tmp_path / name
        data = path.read_bytes()
        for damaged in (data[:-8], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(UserError, match=r"cannot read .*run_00002.* remove it"):
                count(Batches(text), tmp_path, order=2)
        path.write_bytes(data)


def test_damaged_manifest_is_detected(tmp_path):
    run = {"name": "run_00000", "windows": 3, "sequences": 2}
    for changes in (
        {"version": 1},
        {"runs": [{"name": "run_00000"}]},
        {"runs": [{**run, "name": "../run_00000"}]},
        {"runs": [{**run, "windows": 2.5}]},
    ):
        content = {"version": sorted_runs.KIND.version, "settings": {}, "runs": []}
        (tmp_path / MANIFEST).write_text(
            json.dumps({"magic": sorted_runs.KIND.text, **content, **changes})
        )
        with pytest.raises(UserError, match="cannot read"):
            count(Batches([]), tmp_path, order=2)


def test_full_disk_keeps_earlier_runs(tmp_path, text, expected, monkeypatch):
    output = tmp_path / "counts"
    original = files.replacing_file
    fails = "run_00000.counts"

    def full(path):
        if path.name == fails:
            path = pathlib.Path("/dev/full/x")
        return original(path)

    monkeypatch.setattr("bpd_jax.storage.files.replacing_file", full)
    with pytest.raises(UserError, match="cannot write /dev/full/x"):
        count_to_folder(Batches(text), output)
    assert list(tmp_path.iterdir()) == []
    fails = "run_00003.counts"
    with pytest.raises(UserError, match="3 earlier runs are kept"):
        count_to_folder(Batches(text), output)
    assert not output.exists()
    work = tmp_path / "counts.work"
    assert len(list(work.glob("run_*.windows"))) == 3
    monkeypatch.setattr("bpd_jax.storage.files.replacing_file", original)

    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(counts_module._Column, "append", no_room)
    with pytest.raises(UserError, match="No space left on device; the runs counted"):
        count_to_folder(Batches(text), output)
    assert not output.exists()
    monkeypatch.undo()
    resumed = Batches(text)
    assert_same(count_to_folder(resumed, output), expected)
    assert resumed.read_from == []
    assert not work.exists()


@pytest.mark.parametrize(
    "text, arguments, message",
    [
        ([], {}, "text holds no text to count"),
        ([[1]] * 57 + [[1, V]], {}, f"text: sequence 58 holds the token {V}"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, text, arguments, message):
    with pytest.raises(UserError, match=message):
        count(Batches(text), tmp_path / "work", **arguments)
