"""One point of a sweep: its configuration, command, progress and results."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from bpd_jax import configuration
from bpd_jax.base.cli import rewrite_gin_arguments
from bpd_jax.base.errors import UserError
from bpd_jax.configuration import Parsed
from bpd_jax.data.text_readers import read_text
from bpd_jax.training import metrics, run_folder
from bpd_jax.training.checkpoint_files import whole_steps
from bpd_jax.training.checkpoints import FOLDER as CHECKPOINTS
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.decisions import Selection


@dataclasses.dataclass(frozen=True)
class Point:
    """A run of a sweep.

    Attributes:
      name: such as `heads=3`.
      folder: run folder.
      gin_files: in order.
      bindings: statements such as `STEPS = 10`.
      parsed: the resulting configuration.
    """

    name: str
    folder: pathlib.Path
    gin_files: tuple[str, ...]
    bindings: tuple[str, ...]
    parsed: Parsed[TrainConfig]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Its evaluations so far, in order."""
        logged = metrics.read_rows(self.folder / metrics.FILE_NAME)
        return [row for row in logged if self.parsed.value.select_by in row]

    def best(self) -> dict[str, Any] | None:
        """The evaluation of the selected checkpoint; None before the first."""
        step = self._selection().step
        return next((row for row in self.rows if row["step"] == step), None)

    def is_finished(self) -> bool:
        """Whether the run has ended, at its last step or early, and is saved.

        Raises:
          UserError: its folder contains a run with other settings.
        """
        saved = self.folder / run_folder.CONFIG
        if not saved.exists():
            return False
        if read_text(saved) != self.parsed.text:
            raise UserError(
                f"{self.folder} contains a run with other settings: choose another "
                "--output, or delete it."
            )
        rows, config = self.rows, self.parsed.value
        # The upload of the last checkpoint to a bucket may be in progress.
        if not rows or rows[-1]["step"] not in whole_steps(self.folder / CHECKPOINTS):
            return False
        over = self._selection().is_over(config.patience)
        return over or rows[-1]["step"] >= config.steps

    def _selection(self) -> Selection:
        selection = Selection(self.parsed.value.select_by)
        for row in self.rows:
            selection = selection.after(row["step"], row)
        return selection


def make_point(
    name: str,
    arguments: Sequence[str],
    folder: pathlib.Path,
    more_files: Sequence[str] = (),
    more_bindings: Sequence[str] = (),
) -> Point:
    """Builds the configuration of a point.

    Args:
      name: of the point.
      arguments: `--gin_file=…` and `--gin.NAME=VALUE`.
      folder: of the run.
      more_files: further gin files, applied after those of the point.
      more_bindings: further statements, applied after those of the point.

    Raises:
      UserError: a file or a setting is wrong.
    """
    files, bindings = [], []
    for argument in rewrite_gin_arguments(arguments):
        kind, _, value = argument.partition("=")
        (files if kind == "--gin_file" else bindings).append(value)
    files += more_files
    bindings += more_bindings
    parsed = configuration.parse(files, bindings, TrainConfig)
    return Point(name, folder, tuple(files), tuple(bindings), parsed)
