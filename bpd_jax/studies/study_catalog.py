"""All studies, by name."""

import difflib
import importlib

from bpd_jax.errors import UserError
from bpd_jax.studies.study import Study

NAMES = (
    "table1",
    "table3",
    "table4",
    "table5",
    "table7",
    "table8",
    "table10",
    "table11",
    "table12",
    "table_e",
    "figure3",
    "figure4",
    "figure6",
    "figure7",
    "searches",
)
"""Names in the order of a report. Each is a module of this package with a `STUDY`."""


def find_study(name: str) -> Study:
    """Returns a study by its name.

    Raises:
      UserError: the name is unknown.
    """
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {', '.join(NAMES)}."
        raise UserError(f"there is no study {name!r}: {hint}")
    study: Study = importlib.import_module(f"bpd_jax.studies.{name}").STUDY
    return study
