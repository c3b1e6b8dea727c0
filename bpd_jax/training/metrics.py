"""One writer of metrics: JSON lines always, TensorBoard where it is installed."""

import importlib.util
import json
import os
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TextIO

from bpd_jax import files
from bpd_jax.errors import UserError

FILE_NAME = "metrics.jsonl"
TENSORBOARD = "tensorboard"


def tensorboard_available() -> bool:
    """Whether the package tensorboardX, which writes event files, is installed."""
    return importlib.util.find_spec("tensorboardX") is not None


class MetricsWriter:
    """Writes rows of numbers, one per call, to `metrics.jsonl` and `tensorboard/`."""

    def __init__(
        self, folder: str | os.PathLike[str], step: int, *, enabled: bool = True
    ) -> None:
        """Continues the files of `folder` after `step`.

        Args:
          folder: of the run.
          step: where the run starts; rows of later steps, left by a run that was
            killed after its last checkpoint, are dropped.
          enabled: False writes nothing, for all processes but one.
        """
        self._file: TextIO | None = None
        self._events: Any = None
        if not enabled:
            return
        folder = pathlib.Path(folder)
        path = folder / FILE_NAME
        kept = [row for row in read_rows(path) if row["step"] <= step]
        with files.replacing_file(path) as temporary:
            text = "".join(json.dumps(row) + "\n" for row in kept)
            temporary.write_text(text, encoding="utf-8")
        # One line a write, so that a kill can tear only the last one.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if tensorboard_available():
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(
                str(folder / TENSORBOARD), purge_step=step + 1 if step else None
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one row."""
        row = {"step": step, **values}
        if self._file is not None:
            try:
                self._file.write(json.dumps(row) + "\n")
            except OSError as error:
                raise UserError(
                    f"cannot write {self._file.name}: {error.strerror or error}"
                ) from error
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, [] if there is none, without a torn last line."""
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
