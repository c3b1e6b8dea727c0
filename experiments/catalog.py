"""The studies: each is `STUDY` in `experiments/NAME/study.py`."""

import difflib

from bpd_jax.base.errors import UserError
from bpd_jax.studies.study import Study
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
