"""Sorted runs on disk: counts of more text than memory holds.

Each part of a text that fits is counted by itself; its sorted distinct windows and
their counts are a run. Runs are merged by ranges of windows, so that the memory does
not depend on their number or length.

manifest.json        what is counted; per run its windows, sequences and checksum
run_00000.windows    rows of uint64
run_00000.counts     uint32

The manifest is there before the first run, and names a run only when it is whole: a
killed count goes on after the last one.
"""

import bisect
import contextlib
import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bpd_jax import files, folders, temporaries
from bpd_jax.buckets import as_path
from bpd_jax.errors import UserError
from bpd_jax.ngrams import parallel
from bpd_jax.ngrams.counting.windows import Counted, SortedWindows, merged

MANIFEST = "manifest.json"
_MAGIC = "bpd_jax n-gram runs"
_VERSION = 1
# The columns are those of `levels.assemble`.
_COLUMNS = ("keys_*.bin", "counts_*.bin", "followed_*.bin")
KIND = folders.FolderKind(
    "runs of a count", MANIFEST, ("run_*.windows", "run_*.counts", *_COLUMNS), _MAGIC
)
# A run's counts are kept in 32 bits, so it is made of fewer windows than this.
MOST_WINDOWS = 2**32 - 1
# What merging takes at once: windows of all runs, copies, and their merger.
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
      folder: where they lie; it appears with the first run.
      sequences: how many sequences of the source are counted in the runs.
      complete: whether those are all.
    """

    def __init__(
        self, folder: str | os.PathLike[str], words: int, settings: Mapping[str, Any]
    ) -> None:
        """Opens the folder, or remembers where to make it.

        Args:
          folder: the folder.
          words: W of the windows.
          settings: what is counted, for JSON.

        Raises:
          UserError: the folder holds something else, runs of another count, or runs
            that are damaged.
        """
        self.folder = as_path(folder)
        self.complete = False
        self._words = words
        self._settings = dict(settings)
        self._runs: list[_Run] = []
        manifest = self.folder / MANIFEST
        # `_read` says more about a manifest that is damaged.
        folders.check_folder(self.folder, dataclasses.replace(KIND, text=""))
        temporaries.remove_remainders(self.folder)
        if manifest.exists():
            self._read(manifest)

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def sequences(self) -> int:
        """How many sequences of the source the runs have between them."""
        return sum(run.sequences for run in self._runs)

    def append(self, parts: Iterable[Counted], sequences: int) -> None:
        """Writes a run.

        Args:
          parts: sorted distinct windows, each part above the one before.
          sequences: how many sequences of the source it has.

        Raises:
          UserError: it cannot be written; the runs before it are kept. Where there
            are none, the folder is removed.
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
                f"{error}; what was counted before is kept, in {len(self._runs)} runs: "
                "make room and count again with the same settings to go on."
            ) from error
        self._runs.append(run)

    def finish(self) -> None:
        """Notes that the runs have the whole source."""
        self._write(self._runs, complete=True)
        self.complete = True

    def merge(self, memory: int) -> SortedWindows:
        """Merges the runs, taking about `memory` bytes for it."""
        threads = parallel.cores()
        runs = [self._map(run) for run in self._runs]
        total = sum(run.windows for run in self._runs)
        at_once = memory // (_COPIES * (threads + 2) * 8 * (self._words + 1))
        number = max(total // max(at_once, 1), 4 * threads) + 1
        # Ranges are told apart by the first word of a window alone.
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
            for (rows, counts), places in zip(runs, cuts, strict=True):
                place = slice(places[part], places[part + 1])
                lists.append(
                    Counted(np.array(rows[place]), counts[place].astype(np.int64))
                )
            return merged(lists)

        parts = parallel.in_order(load, range(limits.size + 1), threads)
        return SortedWindows(total, limits.size + 1, parts)

    def _map(self, run: _Run) -> tuple[np.ndarray, np.ndarray]:
        path = self.folder / run.name
        shape = (run.windows, self._words)
        try:
            rows = np.memmap(path.with_suffix(".windows"), np.uint64, "r", 0, shape)
            counts = np.memmap(path.with_suffix(".counts"), np.uint32, "r")
        except (OSError, ValueError) as error:
            raise self._damaged(run) from error
        if counts.size != run.windows:
            raise self._damaged(run)
        return np.asarray(rows), np.asarray(counts)

    def _damaged(self, run: _Run) -> UserError:
        return UserError(
            f"{self.folder / run.name} is missing, cut short or damaged: remove "
            f"{self.folder} to count from the beginning."
        )

    def _verify(self, run: _Run) -> None:
        """Raises a `UserError` unless the run is what was written."""
        rows, counts = self._map(run)
        checksums = (0, 0)
        for begin in range(0, run.windows, _BLOCK):
            block = slice(begin, begin + _BLOCK)
            checksums = _checksums(rows[block], counts[block], checksums)
        if checksums != tuple(run.crc32):
            raise self._damaged(run)

    def _write(self, runs: Iterable[_Run], *, complete: bool) -> None:
        content = {
            "magic": _MAGIC,
            "version": _VERSION,
            "settings": self._settings,
            "runs": [run._asdict() for run in runs],
            "complete": complete,
        }
        with files.replacing_file(self.folder / MANIFEST) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", "utf-8")

    def _read(self, path: pathlib.Path) -> None:
        try:
            content = files.read_json(path)
            found = (content["magic"], content["version"])
            settings, complete = {**content["settings"]}, bool(content["complete"])
            runs = [_run(**run) for run in content["runs"]]
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path} is no manifest of runs: remove {self.folder} to count from "
                "the beginning, if nothing else is in it."
            ) from error
        if found != (_MAGIC, _VERSION):
            raise UserError(f"{path} was written by another program or version.")
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise UserError(
                    f"{self.folder} holds the runs of another count, with {name} = "
                    f"{settings.get(name)} and not {value}: count with the settings "
                    "and the text it was begun with, or remove the folder."
                )
        self._runs, self.complete = runs, complete
        for run in runs:
            self._verify(run)


def _run(name: str, windows: int, sequences: int, crc32: Iterable[int]) -> _Run:
    """Returns a run of a manifest, which may hold anything."""
    first, second = crc32
    return _Run(str(name), int(windows), int(sequences), (int(first), int(second)))


def _checksums(
    rows: np.ndarray, counts: np.ndarray, before: tuple[int, int]
) -> tuple[int, int]:
    return zlib.crc32(rows.data, before[0]), zlib.crc32(counts.data, before[1])
