"""Sentences that describe runs: models, numbers of texts and lengths."""

import dataclasses
from collections.abc import Mapping, Sequence

from bpd_jax.reporting.exhibits import Exhibit
from bpd_jax.reporting.records import Facts

_MODEL = ("trunk", "heads")
_SETTINGS = ("max_new_tokens", "longest_prompt", "longest_whole", "lattice_width")


@dataclasses.dataclass
class _Group:
    """Studies of one size with the same settings.

    Attributes:
      name: name of the size, and of the model if it differs.
      common: trunk, heads or block drafter, and settings.
      block_size: tokens of a draft of the block drafter; 0 if unknown, or without one.
      counts: number of reported and of tuning texts by task.
      studies: titles of the studies.
    """

    name: str
    common: Facts
    block_size: int
    counts: dict[str, dict[str, int]]
    studies: list[str]

    def matches(self, other: "_Group") -> bool:
        """Whether one sentence can describe both groups."""
        return (
            (self.name, self.common) == (other.name, other.common)
            and len({self.block_size, other.block_size} - {0}) < 2
            and all(
                self.counts.get(task, counts) == counts
                for task, counts in other.counts.items()
            )
        )

    def add(self, other: "_Group") -> None:
        """Adds the studies of another group that this one matches."""
        self.block_size = max(self.block_size, other.block_size)
        self.counts |= other.counts
        self.studies += other.studies


def sentences(exhibits: Sequence[Exhibit]) -> list[str]:
    """Returns one sentence per size of run; several if the studies of a size differ."""
    groups: list[_Group] = []
    for exhibit in exhibits:
        new = _group(exhibit)
        if not new.common and not new.counts:
            continue
        for group in groups:
            if group.matches(new):
                group.add(new)
                break
        else:
            groups.append(new)
    result, names = [], set[str]()
    for group in groups:
        # All sentences of a size but the first one name their studies.
        studies = f" ({', '.join(group.studies)})" if group.name in names else ""
        names.add(group.name)
        result.append(f"{group.name}{studies}: {_sentence(group)}.")
    return result


def _group(exhibit: Exhibit) -> _Group:
    facts = exhibit.facts
    size, model = (str(facts.get(name) or "") for name in ("size", "model"))
    name = " · ".join(dict.fromkeys(filter(None, (size, model)))) or exhibit.title
    settings = facts.get("settings") or {}
    common = {name: facts[name] for name in _MODEL if name in facts}
    common |= {name: settings[name] for name in _SETTINGS if name in settings}
    counts = {task: dict(n) for task, n in (facts.get("examples") or {}).items()}
    block_size = 0
    if settings.get("source") == "block":  # In place of the model's heads.
        common["source"] = "block"
        block_size = int(facts.get("block_size") or 0)
    return _Group(name, common, block_size, counts, [exhibit.title])


def _sentence(group: _Group) -> str:
    common = group.common
    model, step = [], "head"
    if "trunk" in common:
        model.append(str(common["trunk"]))
    if "source" in common:
        step = "position"
        model.append("block drafter")
        if group.block_size:
            model.append(f"L = {group.block_size}")
    elif "heads" in common:
        model.append(f"{common['heads']} heads")
    parts = [", ".join(model), _texts(group.counts)]
    if "max_new_tokens" in common:
        parts.append(f"up to {common['max_new_tokens']} decoded tokens per text")
    if "lattice_width" in common:
        parts.append(f"{common['lattice_width']} candidates per {step}")
    lengths = []
    if "longest_prompt" in common:
        most = common["longest_prompt"]
        lengths.append(f"prompts of at most {most} tokens with a truncated document")
    if "longest_whole" in common:
        most = common["longest_whole"]
        lengths.append(f"of at most {most} without a document")
    return "; ".join(filter(None, [*parts, ", ".join(lengths)]))


def _texts(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The number of texts, in total and per task."""
    reported = [parts.get("report", 0) for parts in counts.values()]
    tuned = sum(parts.get("tune", 0) for parts in counts.values())
    if not reported:
        return ""
    least, most = min(reported), max(reported)
    each = str(most) if least == most else f"{least} to {most}"
    tasks = "one task" if len(reported) == 1 else f"each of {len(reported)} tasks"
    description = f"{sum(reported)} reported texts ({each} of {tasks})"
    if tuned:
        description += f", {tuned} tuning texts"
    return f"{description}, drawn with a fixed random seed"
