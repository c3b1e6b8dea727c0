"""One writer of metrics: JSON lines always, TensorBoard where it is installed."""

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TextIO

from bpd_jax import buckets, files, progress
from bpd_jax.buckets import as_path

FILE_NAME = "metrics.jsonl"
TENSORBOARD = "tensorboard"


def tensorboard_available() -> bool:
    """Whether the package tensorboardX, which writes event files, is installed."""
    return importlib.util.find_spec("tensorboardX") is not None


class MetricsWriter:
    """Writes rows of numbers, one per call, to `metrics.jsonl` and `tensorboard/`."""

    def __init__(self, folder: str | os.PathLike[str], step: int) -> None:
        """Continues the files of `folder` after `step`.

        Args:
          folder: run folder.
          step: step at which the run starts; rows of later steps, from a run that was
            killed after its last checkpoint, are dropped.

        Raises:
          UserError: they cannot be written.
        """
        self._events: Any = None
        self._told = False
        folder = as_path(folder)
        self._folder = folder
        # Under gs:// nothing is appended to; see `publish`.
        self._local = buckets.on_disk(folder)
        path = folder / FILE_NAME
        retained = [row for row in read_rows(path) if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in retained)
        for copy in {path, self._local / FILE_NAME}:
            with files.replacing_file(copy) as temporary:
                temporary.write_text(text, encoding="utf-8")
        # One write per line, so that a kill can truncate only the last line.
        path = self._local / FILE_NAME
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        if tensorboard_available():
            from tensorboardX import SummaryWriter

            begun = (folder / TENSORBOARD).exists()
            self._events = SummaryWriter(
                str(self._local / TENSORBOARD), purge_step=step + 1 if begun else None
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one row; if that fails, prints one warning, and the run continues."""
        row = {"step": step, **values}
        with self._telling():
            self._file.write(json.dumps(row) + "\n")
        if self._events is not None:
            with self._telling():
                for name, value in values.items():
                    self._events.add_scalar(name, value, step)

    def publish(self) -> None:
        """Uploads the files of a run under gs://; others are where they belong."""
        if not isinstance(self._folder, buckets.BucketPath):
            return
        with self._telling():
            if self._events is not None and not self._file.closed:
                self._events.flush()
            events = (self._local / TENSORBOARD).glob("*")
            for path in (self._local / FILE_NAME, *events):
                target = self._folder / path.relative_to(self._local)
                buckets.upload(path, target)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        # After an error the other processes would wait for this one.
        try:
            yield
        except OSError as error:
            if not self._told:
                progress.say(
                    f"warning: cannot write {self._file.name}: "
                    f"{error.strerror or error}; training continues",
                    sys.stderr,
                )
            self._told = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._telling():
            self._file.close()
        if self._events is not None:
            with self._telling():
                self._events.close()
        self.publish()


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the rows of a `metrics.jsonl` up to the first that is damaged.

    A kill can leave the last line incomplete. Without a file there are no rows.
    """
    try:
        with as_path(path).open("rb") as stream:
            lines = list(files.bounded_lines(stream, path, kept=True))
    except FileNotFoundError:
        return []
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows
