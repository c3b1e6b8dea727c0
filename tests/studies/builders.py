"""Builders of records and exhibits for the tests of studies."""

import pathlib

from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_catalog import find_study
from bpd_jax.studies.study_records import REPORT, DraftRecord


def draft(
    contender, task, accepted, *, example=0, part=REPORT, equal="", nodes=1, entropy=()
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
        longest="1" * count,
        nodes=nodes,
        head_entropy=[*entropy],
    )


def exhibit_of(study, records, tasks=(), **facts):
    """The exhibit of a run. The label of a task is in capitals."""
    facts = {"tasks": {task: task.upper() for task in tasks}, **facts}
    run = StudyRun(pathlib.Path(), study, facts, list(records))
    return find_study(study).exhibit(run)
