"""Sorted runs on disk, for counting more text than fits into memory.

The text is counted in parts that fit; the sorted distinct windows of a part and their
counts form a run. Runs are merged by ranges of windows, so that the memory does not
depend on their number or length.

manifest.json        settings; numbers of windows and sequences of each run
run_00000.windows    rows of uint64
run_00000.counts     uint32

The manifest is written before the first run, and lists a run only when it is complete:
a killed count resumes after the last complete run.
"""

import bisect
import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import parallel
from bpd_jax.ngrams.counting.windows import Counted, SortedWindows, merged
from bpd_jax.storage import files, folders
from bpd_jax.storage.folders import Artifact
from bpd_jax.storage.paths import as_path

KIND = Artifact(
    "runs of a count",
    "manifest.json",
    # The columns are those of `counts.assemble`.
    ("run_*.windows", "run_*.counts", "keys_*.bin", "counts_*.bin", "followed_*.bin"),
    "bpd_jax n-gram runs",
    remedy="if the folder contains nothing else, remove it to count from the beginning",
    version=3,
)
# The counts of a run have 32 bits, so a run has at most this number of windows.
MOST_WINDOWS = 2**32 - 1
# Copies of the windows in memory during a merge: those of all runs, and the result.
_COPIES = 4
_SAMPLES = 64  # per range of windows


class _Run(NamedTuple):
    """A run in the manifest."""

    name: str
    windows: int
    sequences: int


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
        name = _name(len(self._runs))
        windows = 0
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
                    rows_file.write(rows.data)
                    counts_file.write(counts.astype(np.uint32).data)
                    windows += len(rows)
            run = _Run(name, windows, sequences)
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
        """The windows and counts of a run, whose sizes are those of the manifest."""
        path = self.folder / f"{run.name}.windows"
        shape = (run.windows, self._words)
        with KIND.reading(path):
            rows = np.memmap(path, np.uint64, "r")
            counts = np.memmap(path.with_suffix(".counts"), np.uint32, "r")
            if counts.size != run.windows:
                raise ValueError("there is another number of counts")
            return np.asarray(rows).reshape(shape), np.asarray(counts)

    def _write(self, runs: Iterable[_Run], *, complete: bool) -> None:
        KIND.write_header(
            self.folder,
            {
                "magic": KIND.text,
                "settings": self._settings,
                "runs": [run._asdict() for run in runs],
                "complete": complete,
            },
        )

    def _read(self) -> None:
        manifest = KIND.read_header(self.folder, {"settings": dict, "runs": list})
        with KIND.reading(self.folder / KIND.marker):
            runs = [_Run(**run) for run in manifest["runs"]]
            for number, run in enumerate(runs):
                sizes = (run.windows, run.sequences)
                if run.name != _name(number) or any(type(n) is not int for n in sizes):
                    raise ValueError(f"run {number} is not one of a count")
        for name, value in self._settings.items():
            stored = manifest["settings"].get(name)
            if stored != value:
                raise UserError(
                    f"{self.folder} holds the runs of another count, with {name} = "
                    f"{stored} and not {value}: use the same settings and text to "
                    "resume it, or remove the folder."
                )
        for run in runs:
            self._map(run)
        self._runs, self.complete = runs, manifest.get("complete") is True


def _name(number: int) -> str:
    return f"run_{number:05d}"
