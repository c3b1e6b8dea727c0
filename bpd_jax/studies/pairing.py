"""Which contenders were recorded, and on which examples several can be compared."""

from collections.abc import Sequence

from bpd_jax.decoding.methods import Method
from bpd_jax.studies.config import parse_contender
from bpd_jax.studies.records import REPORT, DraftRecord
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.summary import drafts_of


def contenders_of(run: StudyRun) -> list[str]:
    """The contenders with records of drafts, in the order of the configuration."""
    found = dict.fromkeys(record.contender for record in run.of(DraftRecord))
    named = [name for name in run.facts.get("labels", {}) if name in found]
    return list(dict.fromkeys([*named, *found]))


def oracle_of(run: StudyRun) -> str | None:
    """The recorded oracle that bounds the others: of all heads, the widest.

    A width that is not written is the lattice's, which no other exceeds.
    """
    parsed = [parse_contender(name) for name in contenders_of(run)]
    oracles = [
        contender
        for contender in parsed
        if contender.method.is_oracle and contender.method.setting("heads") is None
    ]
    widest = max(
        oracles, key=lambda c: c.method.setting("k") or float("inf"), default=None
    )
    return None if widest is None else widest.name


def drafts_from_lattice(method: Method) -> bool:
    """Whether all that a method drafts lies in the heads' lattice, which bounds it."""
    return method.within_lattice and not method.is_oracle


def paired(
    run: StudyRun,
    contenders: Sequence[str],
    task: str | None = None,
    part: str = REPORT,
) -> list[list[DraftRecord]]:
    """What contenders drafted on the examples that all of them were recorded on.

    Args:
      run: of a study, perhaps stopped before its end.
      contenders: their names.
      task: one task; None for all.
      part: of the examples.

    Returns:
      One list per contender, all in the same order.
    """
    found = [drafts_of(run, name, task, part) for name in contenders]
    places = [{(record.task, record.example) for record in one} for one in found]
    common = set.intersection(*places) if places else set()
    return [
        [record for record in one if (record.task, record.example) in common]
        for one in found
    ]
