"""The log of a run: JSON lines, and TensorBoard events if tensorboardX is installed."""

import contextlib
import importlib.util
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self, TextIO

from bpd_jax.base import progress, reading
from bpd_jax.base.errors import UserError
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path, in_bucket, upload, work_place

FILE_NAME = "metrics.jsonl"
TENSORBOARD = "tensorboard"

_FLUSH_SECONDS = 120  # between two times that events are written to the disk


def tensorboard_available() -> bool:
    """Whether the package tensorboardX, which writes event files, is installed."""
    return importlib.util.find_spec("tensorboardX") is not None


class MetricsWriter:
    """Writes rows of numbers, one per call, to `metrics.jsonl` and `tensorboard/`.

    NaN and infinities are written as `NaN`, `Infinity` and `-Infinity`, which Python's
    `json` reads but strict JSON does not have.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int) -> None:
        """Continues the files of `folder` after `step`.

        Rows of later steps, from a run that was killed after its last checkpoint, are
        dropped, and so are damaged lines.
        """
        self._events: _EventFile | None = None
        self._warned = False
        folder = as_path(folder)
        self._folder = folder
        # Objects under gs:// cannot be appended to; see `publish`.
        self._local = work_place(folder)
        path = folder / FILE_NAME
        rows = [row for row in read_rows(path) if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        for copy in {path, self._local / FILE_NAME}:
            files.write_text(copy, text)
        # One write per line, so that a kill can truncate only the last line.
        path = self._local / FILE_NAME
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        if tensorboard_available():
            resumed = (folder / TENSORBOARD).exists()
            with self._warn_once():
                self._events = _EventFile(
                    self._local / TENSORBOARD, step + 1 if resumed else None
                )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one row; if writing fails, warns once and lets the run continue."""
        row = {"step": step, **values}
        with self._warn_once():
            self._file.write(json.dumps(row) + "\n")
        if (events := self._events) is not None:
            # What follows half an event cannot be read, so a failure ends the file.
            self._events = None
            with self._warn_once():
                events.write(step, values)
                self._events = events

    def publish(self) -> None:
        """Writes all events to the disk; uploads the files of a run under gs://."""
        if self._events is not None and not self._file.closed:
            with self._warn_once():
                self._events.flush()
        if not in_bucket(self._folder):
            return
        with self._warn_once():
            events = (self._local / TENSORBOARD).glob("*")
            for path in (self._local / FILE_NAME, *events):
                target = self._folder / path.relative_to(self._local)
                upload(path, target)

    @contextlib.contextmanager
    def _warn_once(self) -> Iterator[None]:
        # If this process ended here, the other ones would wait for it.
        try:
            yield
        except OSError as error:
            if not self._warned:
                progress.say(
                    f"warning: cannot write the log of {self._folder}: "
                    f"{error.strerror or error}; training continues",
                    sys.stderr,
                )
            self._warned = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._warn_once():
            self._file.close()
        if self._events is not None:
            with self._warn_once():
                self._events.close()
        self.publish()


class _EventFile:
    """A file of TensorBoard events, one for each row of numbers.

    tensorboardX's SummaryWriter writes in a thread. On a full disk the thread dies, and
    the program waits for it forever. This class writes in the caller's thread, so that
    an OSError reaches the caller.
    """

    def __init__(self, folder: pathlib.Path, first_step: int | None) -> None:
        """Begins a file.

        The folder holds those of earlier parts of the run too, whose events from
        `first_step` on are not shown.
        """
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._protos = event_pb2, summary_pb2
        self._flushed = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        # Two parts of a run may begin in the same second, which names the file.
        number = sum(1 for _ in folder.iterdir())
        self._writer = EventsWriter(str(folder / "events"), f".{number}")
        self.close = self._writer.close
        if first_step is not None:
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(first_step, session_log=log)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        _, summary_pb2 = self._protos
        numbers = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        self._append(step, summary=summary_pb2.Summary(value=numbers))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes all rows to the disk."""
        self._writer.flush()
        self._flushed = time.monotonic()

    def _append(self, step: int, **content: Any) -> None:
        event_pb2, _ = self._protos
        event = event_pb2.Event(wall_time=time.time(), step=step, **content)
        self._writer.write_event(event)


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the rows of a `metrics.jsonl`; a missing file has none.

    Damaged lines are skipped with a warning, an incomplete last one, which a killed run
    can leave, without.
    """
    try:
        with as_path(path).open("rb") as stream:
            lines = list(reading.bounded_lines(stream, path, kept=True))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error
    rows = list(map(_parse, lines))
    damaged = [
        number
        for number, (row, line) in enumerate(zip(rows, lines, strict=True), start=1)
        if row is None and line.endswith(b"\n")
    ]
    if damaged:
        numbers = ", ".join(map(str, damaged[:5])) + ", …" * (len(damaged) > 5)
        progress.say(f"warning: {path} has damaged lines, which are skipped: {numbers}")
    return [row for row in rows if row is not None]


def finite(row: Mapping[str, float]) -> dict[str, float]:
    """The values of a row that strict JSON can hold: without NaN and infinities."""
    return {name: value for name, value in row.items() if math.isfinite(value)}


def _parse(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None if it is damaged."""
    try:
        # Not `reading.parse_json`, which refuses NaN and infinities.
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    # Integers beyond 64 bits may be too large for a float.
    valid = (
        type(x) is float or (type(x) is int and abs(x) < 2**63) for x in row.values()
    )
    return row if all(valid) else None
