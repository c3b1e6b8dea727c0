"""Tests of `bounded_memory` and `sorted_runs` in bpd_jax.ngrams.counting."""

import contextlib
import filecmp
import json
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from bpd_jax import files, temporaries
from bpd_jax.errors import UserError
from bpd_jax.ngrams.counting import bounded_memory, levels, sorted_runs
from bpd_jax.ngrams.counting.counts import NGramCounts, count_ngrams, with_min_counts
from bpd_jax.ngrams.counting.sources import TokenSource, open_source
from bpd_jax.ngrams.counting.windows import TokenBatch, join

MEMORY = 1_000_000  # about 12 runs of the text below
V = 300


class Batches(TokenSource):
    """Sequences in batches of ten; the first iteration fails after `fail_after`."""

    def __init__(self, text: list[np.ndarray], fail_after: int | None = None) -> None:
        super().__init__("text", V, None)
        self.text = text
        self.fail_after = fail_after
        self.read_from: list[int] = []

    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        self.read_from.append(skip)
        for begin in range(skip, len(self.text), 10):
            if self.fail_after is not None and begin >= self.fail_after:
                raise KeyboardInterrupt
            yield join(self.text[begin : begin + 10])

    def fingerprint(self) -> str:
        return f"{len(self.text)} sequences"


@pytest.fixture(scope="module")
def text() -> list[np.ndarray]:
    """1,200 sequences with repeated patterns, 240,000 tokens."""
    rng = np.random.default_rng(3)
    return [
        np.minimum(rng.geometric(0.05, size=rng.integers(0, 400)) - 1, V - 1)
        for _ in range(1200)
    ]


@pytest.fixture(scope="module")
def expected(text: list[np.ndarray]) -> NGramCounts:
    return count_ngrams(text, order=4, vocab_size=V)


def assert_same(actual: NGramCounts, expected: NGramCounts) -> None:
    assert actual.sizes == expected.sizes
    assert actual.seen == expected.seen
    for name in ("keys", "counts", "followed"):
        for array, expected_array in zip(
            getattr(actual, name), getattr(expected, name), strict=True
        ):
            np.testing.assert_array_equal(array, expected_array)


def same_folders(first: pathlib.Path, second: pathlib.Path) -> bool:
    names = sorted(path.name for path in first.iterdir())
    equal, _, _ = filecmp.cmpfiles(first, second, names, shallow=False)
    return sorted(equal) == names == sorted(path.name for path in second.iterdir())


@pytest.mark.parametrize("memory", [MEMORY, 3 * MEMORY, 10**9])
@pytest.mark.parametrize("with_folder", [True, False])
def test_counts_do_not_depend_on_the_memory(
    tmp_path: pathlib.Path,
    text: list[np.ndarray],
    expected: NGramCounts,
    memory: int,
    with_folder: bool,
) -> None:
    work = tmp_path / "work" if with_folder else None
    counts = bounded_memory.count(
        Batches(text), order=4, memory=memory, work_folder=work
    )
    assert_same(counts, expected)
    num_runs = len(list(tmp_path.glob("work/run_*.windows")))
    if memory == 10**9 or not with_folder:
        assert num_runs == 0
    else:
        assert num_runs >= 2


@pytest.mark.parametrize("order", [1, 2, 9])
def test_runs_of_all_orders_are_merged(
    tmp_path: pathlib.Path, text: list[np.ndarray], order: int
) -> None:
    counts = bounded_memory.count(
        Batches(text), order=order, memory=MEMORY, work_folder=tmp_path
    )
    assert_same(counts, count_ngrams(text, order=order, vocab_size=V))


@pytest.mark.parametrize(
    "minimums", [(1, 1, 2, 4), (1, 3, 3, 3), (1, 4, 2, 3), (1, 2, 9, 1), (1, 1, 1, 99)]
)
@pytest.mark.parametrize("memory", [MEMORY, 10**9])
def test_min_counts_match_their_definition(
    tmp_path: pathlib.Path,
    text: list[np.ndarray],
    expected: NGramCounts,
    minimums: tuple[int, ...],
    memory: int,
) -> None:
    counts = bounded_memory.count(
        Batches(text),
        order=4,
        min_counts=minimums,
        memory=memory,
        work_folder=tmp_path,
    )
    assert_same(counts, with_min_counts(expected, minimums))
    assert counts.seen == expected.sizes


def test_killed_count_resumes_after_its_last_run(
    tmp_path: pathlib.Path, text: list[np.ndarray], expected: NGramCounts
) -> None:
    killed = Batches(text, fail_after=800)
    with pytest.raises(KeyboardInterrupt):
        bounded_memory.count(killed, order=4, memory=MEMORY, work_folder=tmp_path)
    before = {path.name for path in tmp_path.glob("run_*")}
    assert before
    # A run that is not in the manifest.
    (tmp_path / "run_00099.windows").write_bytes(b"half")
    resumed = Batches(text)
    counts = bounded_memory.count(
        resumed, order=4, memory=3 * MEMORY, work_folder=tmp_path
    )
    assert_same(counts, expected)
    assert 0 < resumed.read_from[0] <= 800
    # Other minimum counts of a complete count do not read the source.
    third = Batches(text)
    counts = bounded_memory.count(
        third, order=4, min_counts=(1, 2, 2, 2), memory=MEMORY, work_folder=tmp_path
    )
    assert_same(counts, with_min_counts(expected, (1, 2, 2, 2)))
    assert third.read_from == []


@pytest.mark.parametrize("last", ["manifest.json", "run_00000.counts"])
def test_count_killed_in_its_first_run_starts_again(
    tmp_path: pathlib.Path,
    text: list[np.ndarray],
    expected: NGramCounts,
    monkeypatch: pytest.MonkeyPatch,
    last: str,
) -> None:
    def kill(path: pathlib.Path) -> contextlib.AbstractContextManager[pathlib.Path]:
        if path.name == last:
            for name in (path.name, "run_00000.windows", "run_00000.counts"):
                path.parent.mkdir(exist_ok=True)
                (path.parent / f".{name}.{temporaries._HOST}.x.part").write_bytes(
                    b"half"
                )
            raise KeyboardInterrupt
        return original(path)

    output, work = tmp_path / "counts", tmp_path / "counts.work"
    original = files.replacing_file
    monkeypatch.setattr("bpd_jax.files.replacing_file", kill)
    with pytest.raises(KeyboardInterrupt):
        bounded_memory.count_to_folder(Batches(text), output, order=4, memory=MEMORY)
    monkeypatch.undo()
    assert len(list(work.glob(".*.part"))) >= 2
    assert (work / sorted_runs.MANIFEST).exists() == (last != sorted_runs.MANIFEST)
    killed = Batches(text, fail_after=800)
    with pytest.raises(KeyboardInterrupt):
        bounded_memory.count_to_folder(killed, output, order=4, memory=MEMORY)
    assert list(work.glob(".*.part")) == []
    assert_same(
        bounded_memory.count_to_folder(Batches(text), output, order=4, memory=MEMORY),
        expected,
    )
    assert not work.exists()


def test_runs_of_another_count_are_refused_and_unchanged(
    tmp_path: pathlib.Path, text: list[np.ndarray]
) -> None:
    bounded_memory.count(Batches(text), order=3, memory=MEMORY, work_folder=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="another count, with order = 3 and not 4"):
        bounded_memory.count(
            Batches(text), order=4, memory=MEMORY, work_folder=tmp_path
        )
    with pytest.raises(UserError, match="another count, with source = 1200 seq"):
        bounded_memory.count(
            Batches(text[1:]), order=3, memory=MEMORY, work_folder=tmp_path
        )
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ["run_00002.windows", "run_00002.counts"])
@pytest.mark.parametrize("damage", ["cut", "change", "remove"])
def test_damaged_run_is_detected(
    tmp_path: pathlib.Path, text: list[np.ndarray], name: str, damage: str
) -> None:
    bounded_memory.count(Batches(text), order=2, memory=MEMORY, work_folder=tmp_path)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-8] if damage == "cut" else data)
    with pytest.raises(UserError, match="run_00002 is missing, truncated or damaged"):
        bounded_memory.count(
            Batches(text), order=2, memory=MEMORY, work_folder=tmp_path
        )


def test_damaged_manifest_is_detected(tmp_path: pathlib.Path) -> None:
    def manifest(**changes: object) -> str:
        content = {
            "magic": sorted_runs._MAGIC,
            "version": sorted_runs._VERSION,
            "settings": {},
            "complete": False,
            **changes,
        }
        content["crc32"] = sorted_runs._content_checksum(content)
        return json.dumps(content)

    run = {"name": "run_00000", "windows": 3, "sequences": 2, "crc32": [1, 2]}
    for content in (
        "{",
        "[]",
        '{"magic": 1}',
        manifest(settings=[], runs=[]),
        manifest(runs=[{"name": "run_00000"}]),
        manifest(runs=[[1]]),
        manifest(runs=[{**run, "name": "../run_00000"}]),
        manifest(runs=[{**run, "windows": -1}]),
        manifest(runs=[{**run, "windows": 2**70}]),
        manifest(runs=[{**run, "sequences": 2.5}]),
        manifest(runs=[{**run, "crc32": [1, "2"]}]),
    ):
        (tmp_path / sorted_runs.MANIFEST).write_text(content)
        with pytest.raises(UserError, match="not a manifest of runs"):
            bounded_memory.count(Batches([]), order=2, work_folder=tmp_path)
    (tmp_path / sorted_runs.MANIFEST).write_text(manifest(version=1, runs=[]))
    with pytest.raises(UserError, match="another program or version"):
        bounded_memory.count(Batches([]), order=2, work_folder=tmp_path)


@pytest.mark.parametrize(
    "old, new", [('"complete": false', '"complete": true'), ("00,", "10,")]
)
def test_changed_manifest_does_not_change_the_counts(
    tmp_path: pathlib.Path, text: list[np.ndarray], old: str, new: str
) -> None:
    killed = Batches(text, fail_after=800)
    with pytest.raises(KeyboardInterrupt):
        bounded_memory.count(killed, order=2, memory=MEMORY, work_folder=tmp_path)
    path = tmp_path / sorted_runs.MANIFEST
    before = path.read_text()
    path.write_text(before.replace(old, new, 1))
    assert path.read_text() != before
    with pytest.raises(UserError, match="not a manifest of runs, or is damaged"):
        bounded_memory.count(
            Batches(text), order=2, memory=MEMORY, work_folder=tmp_path
        )


def test_full_disk_keeps_earlier_runs(
    tmp_path: pathlib.Path,
    text: list[np.ndarray],
    expected: NGramCounts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "counts"
    original = files.replacing_file

    fails = "run_00000.counts"

    def full(path: pathlib.Path) -> object:
        if path.name == fails:
            path = pathlib.Path("/dev/full/x")
        return original(path)

    monkeypatch.setattr("bpd_jax.files.replacing_file", full)
    with pytest.raises(UserError, match="cannot write /dev/full/x"):
        bounded_memory.count_to_folder(Batches(text), output, order=4, memory=MEMORY)
    assert list(tmp_path.iterdir()) == []
    fails = "run_00003.counts"
    with pytest.raises(UserError, match="3 earlier runs are kept"):
        bounded_memory.count_to_folder(Batches(text), output, order=4, memory=MEMORY)
    assert not output.exists()
    work = tmp_path / "counts.work"
    assert len(list(work.glob("run_*.windows"))) == 3
    monkeypatch.setattr("bpd_jax.files.replacing_file", original)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(levels._Column, "append", no_room)
    with pytest.raises(UserError, match="No space left on device; the runs counted"):
        bounded_memory.count_to_folder(Batches(text), output, order=4, memory=MEMORY)
    assert not output.exists()
    monkeypatch.undo()
    resumed = Batches(text)
    counts = bounded_memory.count_to_folder(resumed, output, order=4, memory=MEMORY)
    assert_same(counts, expected)
    assert resumed.read_from == []
    assert not work.exists()


def test_output_does_not_depend_on_the_memory(
    tmp_path: pathlib.Path, text: list[np.ndarray], expected: NGramCounts
) -> None:
    for name, memory in (("small", MEMORY), ("large", 10**9)):
        bounded_memory.count_to_folder(
            Batches(text), tmp_path / name, order=4, memory=memory
        )
    assert same_folders(tmp_path / "small", tmp_path / "large")
    assert_same(NGramCounts.load(tmp_path / "small"), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "small"]


def test_count_after_a_kill_while_runs_were_removed(
    tmp_path: pathlib.Path,
    text: list[np.ndarray],
    expected: NGramCounts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = shutil.rmtree

    def kill(folder: str, ignore_errors: bool = False) -> None:
        for manifest in pathlib.Path(folder).rglob(sorted_runs.MANIFEST):
            manifest.unlink()
            raise KeyboardInterrupt
        original(folder, ignore_errors)

    output = tmp_path / "counts"
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            bounded_memory.count_to_folder(
                Batches(text), output, order=4, memory=MEMORY
            )
    assert_same(NGramCounts.load(output), expected)
    counts = bounded_memory.count_to_folder(
        Batches(text), output, order=4, memory=MEMORY
    )
    assert_same(counts, expected)


def test_folders_with_other_contents_are_unchanged(
    tmp_path: pathlib.Path, text: list[np.ndarray]
) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    for function in (
        lambda: bounded_memory.count_to_folder(Batches(text), tmp_path, order=2),
        lambda: bounded_memory.count(Batches(text), order=2, work_folder=tmp_path),
        lambda: bounded_memory.count_to_folder(Batches(text), thesis, order=2),
    ):
        with pytest.raises(UserError, match=r"new folder|name a folder"):
            function()
    assert list(tmp_path.iterdir()) == [thesis]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"order": 0}, "order is 0"),
        ({"order": 2, "memory": 10}, "memory is 10 bytes"),
        ({"order": 2, "min_counts": [1]}, "min_counts has 1 numbers for 2 orders"),
        ({"order": 2, "min_counts": [2, 2]}, "the first 1"),
        ({"order": 2}, "text holds no text to count"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message: str) -> None:
    with pytest.raises(UserError, match=message):
        bounded_memory.count(Batches([]), **arguments)


def test_error_names_the_token_outside_the_vocabulary(text: list[np.ndarray]) -> None:
    invalid = [*text[:57], np.array([1, V]), *text[57:]]
    with pytest.raises(UserError, match=f"text: sequence 58 holds the token {V}"):
        bounded_memory.count(Batches(invalid), order=2)


def test_numbers_of_documents_and_tokens_are_reported(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.array([0, 1, 2, 9, 9, 3, 9, 4, 4], np.uint16))
    counts = bounded_memory.count(open_source(tokens=str(path), end_of_text=9), order=2)
    assert (counts.sequences, counts.tokens, counts.vocab_size) == (3, 6, 10)
