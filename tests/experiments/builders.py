"""Builders of records and exhibits for the tests of studies."""

import pathlib

from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_records import REPORT, DraftRecord
from experiments.catalog import find_study


def draft(
    contender,
    task,
    accepted,
    *,
    example=0,
    part=REPORT,
    equal="",
    longest="",
    nodes=1,
    entropy=(),
    entropy_counts=(),
):
    """A record of drafts of three tokens; `accepted` and `equal` have a digit each."""
    count = len(accepted)
    return DraftRecord(
        task=task,
        example=example,
        part=part,
        contender=contender,
        accepted=accepted,
        length="3" * count,
        equal=equal or "0" * count,
        longest=longest or "1" * count,
        nodes=nodes,
        head_entropy=[*entropy],
        entropy_counts=[*entropy_counts],
    )


def exhibit_of(study, records, tasks=(), **facts):
    """The exhibit of a run; see `run_of`."""
    return find_study(study).exhibit(run_of(study, records, tasks, **facts))


def run_of(study, records, tasks=(), **facts):
    """A run; labels of tasks are in capitals."""
    facts = {"tasks": {task: task.upper() for task in tasks}, **facts}
    return StudyRun(pathlib.Path(), study, facts, list(records))


def rows_of(table):
    return {row.label: row.cells for row in table.rows}


def values_of(table):
    return {label: [c.value for c in cells] for label, cells in rows_of(table).items()}
