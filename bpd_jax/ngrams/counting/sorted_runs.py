"""Sorted runs on disk, for counting more text than fits into memory.

The text is counted in parts that fit; the sorted distinct windows of a part and their
counts form a run. Runs are merged by ranges of windows, so that the memory does not
depend on their number or length.

manifest.json        settings; windows, sequences and checksums of each run; a checksum
                     of all this
run_00000.windows    rows of uint64
run_00000.counts     uint32

The manifest is written before the first run, and lists a run only when it is complete:
a killed count resumes after the last complete run.
"""

import bisect
import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import parallel
from bpd_jax.ngrams.counting.windows import Counted, SortedWindows, merged
from bpd_jax.storage import files, folders
from bpd_jax.storage.artifacts import Artifact
from bpd_jax.storage.paths import as_path

KIND = Artifact(
    "runs of a count",
    "manifest.json",
    # The columns are those of `order_counts.assemble`.
    ("run_*.windows", "run_*.counts", "keys_*.bin", "counts_*.bin", "followed_*.bin"),
    "bpd_jax n-gram runs",
    remedy="if the folder contains nothing else, remove it to count from the beginning",
    version=2,
)
# The counts of a run have 32 bits, so a run has at most this number of windows.
MOST_WINDOWS = 2**32 - 1
# Copies of the windows in memory during a merge: those of all runs, and the result.
_COPIES = 4
_SAMPLES = 64  # per range of windows
_BLOCK = 1 << 20


class _Run(NamedTuple):
    """A run in the manifest."""

    name: str
    windows: int
    sequences: int
    crc32: tuple[int, int]  # of the windows and of the counts


class RunFolder:
    """The runs of one count.

    Attributes:
      folder: folder of the runs, which is created with the first run.
      sequences: number of sequences of the source in the runs.
      complete: whether the runs contain the complete source.
    """

    def __init__(
        self, folder: str | os.PathLike[str], words: int, settings: Mapping[str, Any]
    ) -> None:
        """Opens the folder if it exists.

        Args:
          folder: the folder.
          words: W of the windows.
          settings: settings of the count, as JSON.
        """
        self.folder = as_path(folder)
        self.complete = False
        self._words = words
        self._settings = dict(settings)
        self._runs: list[_Run] = []
        folders.check_folder(self.folder, KIND)
        if (self.folder / KIND.marker).exists():
            self._read()

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def sequences(self) -> int:
        """Number of sequences of the source in all runs."""
        return sum(run.sequences for run in self._runs)

    def append(self, parts: Iterable[Counted], sequences: int) -> None:
        """Writes a run.

        Args:
          parts: sorted distinct windows; all windows of a part are greater than those
            of the previous part.
          sequences: number of sequences of the source in the run.
        """
        name = f"run_{len(self._runs):05d}"
        windows = 0
        checksums = (0, 0)
        try:
            if not self._runs:
                self._write([], complete=False)
            with (
                files.replacing_file(self.folder / f"{name}.windows") as rows_path,
                files.replacing_file(self.folder / f"{name}.counts") as counts_path,
                open(rows_path, "wb") as rows_file,
                open(counts_path, "wb") as counts_file,
            ):
                for rows, counts in parts:
                    short = counts.astype(np.uint32)
                    rows_file.write(rows.data)
                    counts_file.write(short.data)
                    checksums = _checksums(rows, short, checksums)
                    windows += len(rows)
            run = _Run(name, windows, sequences, checksums)
            self._write([*self._runs, run], complete=False)
        except UserError as error:
            if not self._runs:
                with contextlib.suppress(UserError):
                    folders.remove_folder(self.folder, KIND)
                raise
            raise UserError(
                f"{error}; the {len(self._runs)} earlier runs are kept: free space and "
                "count again with the same settings to resume."
            ) from error
        self._runs.append(run)

    def finish(self) -> None:
        """Marks the runs as complete."""
        self._write(self._runs, complete=True)
        self.complete = True

    def merge(self, memory: int) -> SortedWindows:
        """Merges the runs within about `memory` bytes."""
        threads = parallel.cores()
        runs = [self._map(run) for run in self._runs]
        total = sum(run.windows for run in self._runs)
        at_once = memory // (_COPIES * (threads + 2) * 8 * (self._words + 1))
        number = max(total // max(at_once, 1), 4 * threads) + 1
        # The limits of the ranges are first words of windows.
        stride = max(total // (number * _SAMPLES), 1)
        sample = np.sort(np.concatenate([rows[::stride, 0] for rows, _ in runs]))
        limits = np.unique(sample[:: max(sample.size // number, 1)][1:])
        cuts = [
            [
                0,
                *(bisect.bisect_left(rows[:, 0], limit) for limit in limits),
                len(rows),
            ]
            for rows, _ in runs
        ]

        def load(part: int) -> Counted:
            lists = []
            for (rows, counts), bounds in zip(runs, cuts, strict=True):
                bound = slice(bounds[part], bounds[part + 1])
                lists.append(
                    Counted(np.array(rows[bound]), counts[bound].astype(np.int64))
                )
            return merged(lists)

        parts = parallel.in_order(load, range(limits.size + 1), threads)
        return SortedWindows(total, limits.size + 1, parts)

    def _map(self, run: _Run) -> tuple[np.ndarray, np.ndarray]:
        path = self.folder / f"{run.name}.windows"
        shape = (run.windows, self._words)
        with KIND.reading(path):
            rows = np.memmap(path, np.uint64, "r", 0, shape)
            counts = np.memmap(path.with_suffix(".counts"), np.uint32, "r")
            if counts.size != run.windows:
                raise ValueError("there is another number of counts")
        return np.asarray(rows), np.asarray(counts)

    def _verify(self, run: _Run) -> None:
        """Raises a `UserError` if the checksums of a run have changed."""
        rows, counts = self._map(run)
        checksums = (0, 0)
        for begin in range(0, run.windows, _BLOCK):
            block = slice(begin, begin + _BLOCK)
            checksums = _checksums(rows[block], counts[block], checksums)
        if checksums != run.crc32:
            raise KIND.damaged(self.folder / run.name, "its checksum is wrong")

    def _write(self, runs: Iterable[_Run], *, complete: bool) -> None:
        content = {
            "magic": KIND.text,
            "settings": self._settings,
            "runs": [run._asdict() for run in runs],
            "complete": complete,
        }
        checksum = {"crc32": _content_checksum(content)}
        KIND.write_header(self.folder, content | checksum)

    def _read(self) -> None:
        manifest = KIND.read_header(self.folder, {"settings": dict, "runs": list})
        with KIND.reading(self.folder / KIND.marker):
            if manifest.get("crc32") != _content_checksum(manifest):
                raise ValueError("its checksum is wrong")
            runs = [_run(**run) for run in manifest["runs"]]
        for name, value in self._settings.items():
            stored = manifest["settings"].get(name)
            if stored != value:
                raise UserError(
                    f"{self.folder} holds the runs of another count, with {name} = "
                    f"{stored} and not {value}: use the same settings and text to "
                    "resume it, or remove the folder."
                )
        for run in runs:
            self._verify(run)
        self._runs, self.complete = runs, manifest.get("complete") is True


def _run(name: str, windows: int, sequences: int, crc32: Iterable[int]) -> _Run:
    """Checks an entry of a manifest, whose values may have any type and size.

    Raises:
      TypeError, ValueError: a value is not one that `RunFolder` writes.
    """
    first, second = crc32
    if any(type(value) is not int for value in (windows, sequences, first, second)):
        raise TypeError("a number of a run is not an integer")
    if not re.fullmatch(r"run_\d+", name):
        raise ValueError("a run has another name")
    if not 1 <= windows <= MOST_WINDOWS or not 1 <= sequences < 2**63:
        raise ValueError("a number of a run is out of range")
    return _Run(name, windows, sequences, (first, second))


def _content_checksum(content: Mapping[str, Any]) -> int:
    """The checksum of the fields of a manifest on which the counts depend."""
    fields = [content.get(name) for name in ("settings", "runs", "complete")]
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _checksums(
    rows: np.ndarray, counts: np.ndarray, before: tuple[int, int]
) -> tuple[int, int]:
    return zlib.crc32(rows.data, before[0]), zlib.crc32(counts.data, before[1])
