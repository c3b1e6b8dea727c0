"""The studies: `STUDY` in `experiments/NAME/study.py`, and gin files by size."""

import difflib
import pathlib
from collections.abc import Sequence

from bpd_jax.base import configuration
from bpd_jax.base.configuration import Parsed
from bpd_jax.base.errors import UserError
from bpd_jax.storage.paths import as_path, in_bucket
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import StudyConfig
from experiments.figure3 import study as figure3
from experiments.figure4 import study as figure4
from experiments.figure6 import study as figure6
from experiments.figure7 import study as figure7
from experiments.questions import study as questions
from experiments.searches import study as searches
from experiments.table1 import study as table1
from experiments.table3 import study as table3
from experiments.table4 import study as table4
from experiments.table5 import study as table5
from experiments.table7 import study as table7
from experiments.table8 import study as table8
from experiments.table10 import study as table10
from experiments.table11 import study as table11
from experiments.table12 import study as table12
from experiments.table_e import study as table_e

_HERE = pathlib.Path(__file__).parent

STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY
    for module in (
        table1,
        table3,
        table4,
        table5,
        table7,
        table8,
        table10,
        table11,
        table12,
        table_e,
        figure3,
        figure4,
        figure6,
        figure7,
        searches,
        questions,
    )
}
"""All studies by name, in the order of a report."""


def find_study(name: str) -> Study:
    """Returns a study by its name."""
    if name not in STUDIES:
        close = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {', '.join(STUDIES)}."
        raise UserError(f"there is no study {name!r}: {hint}")
    return STUDIES[name]


def choose(names: Sequence[str], size: str) -> list[str]:
    """The studies of a command line, each once; `all` are those that have the size."""
    if not names:
        raise UserError(f"name a study: {', '.join(STUDIES)}; or all.")
    if list(names) == ["all"]:
        # Of an unknown size all are missing, which is reported below.
        names = [n for n in STUDIES if _gin_file(n, size).is_file()] or [*STUDIES]
    for name in names:
        find_study(name)
        if not _gin_file(name, size).is_file():
            sizes = sorted(path.stem for path in (_HERE / name).glob("*.gin"))
            raise UserError(
                f"{name} has no size {size!r}: choose from {', '.join(sizes)}."
            )
    return list(dict.fromkeys(names))


def results_folder(workdir: str | None, size: str) -> pathlib.Path:
    """The folder in which studies work: `--workdir`, or the default of a size."""
    folder = as_path(workdir or f"runs/paper/{size}")
    if in_bucket(folder):
        raise UserError(
            f"--workdir={workdir}: studies work in a folder on a disk, not in a bucket."
        )
    return folder


def configure(
    name: str, size: str, files: Sequence[str], bindings: Sequence[str]
) -> Parsed[StudyConfig]:
    """The settings of a study: of its size, of further gin files, then of flags."""
    paths = [f"experiments/{name}/{size}.gin", *files]
    names = [f"StudyConfig.study = {name!r}", f"StudyConfig.size = {size!r}"]
    return configuration.parse(
        paths,
        [*names, *bindings],
        StudyConfig,
        defaults=["StudyConfig.mesh = @MeshConfig()"],
    )


def _gin_file(name: str, size: str) -> pathlib.Path:
    return _HERE / name / f"{size}.gin"
