"""Sentences about runs: models, numbers of texts, lengths."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bpd_jax.reporting.exhibits import Exhibit
from bpd_jax.reporting.records import Facts

_MODEL: Sequence[str] = ("trunk", "heads")
_SETTINGS = ("max_new_tokens", "longest_prompt", "longest_whole", "lattice_width")


@dataclasses.dataclass
class _Group:
    """Studies of one size with the same settings.

    Attributes:
      name: of the size, and of the model where that is another.
      alike: trunk, heads and settings.
      counts: texts of every task, to report on and to tune on.
      studies: their titles.
    """

    name: str
    alike: Facts
    counts: dict[str, dict[str, int]]
    studies: list[str]

    def takes(self, other: "_Group") -> bool:
        """Whether another group's study can be said in this one's sentence."""
        return (self.name, self.alike) == (other.name, other.alike) and all(
            self.counts.get(task, counts) == counts
            for task, counts in other.counts.items()
        )


def sentences(exhibits: Sequence[Exhibit]) -> list[str]:
    """Returns a sentence for every size of run; several where its studies differ."""
    groups: list[_Group] = []
    for exhibit in exhibits:
        new = _group(exhibit)
        if not new.alike and not new.counts:
            continue
        for group in groups:
            if group.takes(new):
                group.counts |= new.counts
                group.studies += new.studies
                break
        else:
            groups.append(new)
    result, named = [], set[str]()
    for group in groups:
        # The first sentence of a size is of most studies; others say of which.
        studies = f" ({', '.join(group.studies)})" if group.name in named else ""
        named.add(group.name)
        result.append(f"{group.name}{studies}: {_sentence(group.alike, group.counts)}.")
    return result


def _group(exhibit: Exhibit) -> _Group:
    facts = exhibit.facts
    size, model = (str(facts.get(name) or "") for name in ("size", "model"))
    name = " · ".join(dict.fromkeys(filter(None, (size, model)))) or exhibit.title
    settings = _mapping(facts.get("settings"))
    alike = {name: facts[name] for name in _MODEL if name in facts}
    alike |= {name: settings[name] for name in _SETTINGS if name in settings}
    counts = {
        task: dict(parts)
        for task, parts in _mapping(facts.get("examples")).items()
        if isinstance(parts, Mapping)
    }
    return _Group(name, alike, counts, [exhibit.title])


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sentence(alike: Facts, counts: Mapping[str, Mapping[str, int]]) -> str:
    model = []
    if "trunk" in alike:
        model.append(str(alike["trunk"]))
    if "heads" in alike:
        model.append(f"{alike['heads']} heads")
    parts = [", ".join(model), _texts(counts)]
    if "max_new_tokens" in alike:
        parts.append(f"up to {alike['max_new_tokens']} tokens decoded of each")
    if "lattice_width" in alike:
        parts.append(f"{alike['lattice_width']} candidates of every head")
    lengths = []
    if "longest_prompt" in alike:
        most = alike["longest_prompt"]
        lengths.append(f"documents cut so that a prompt has at most {most} tokens")
    if "longest_whole" in alike:
        most = alike["longest_whole"]
        lengths.append(f"prompts without a document at most {most}")
    return "; ".join(filter(None, [*parts, ", ".join(lengths)]))


def _texts(counts: Mapping[str, Mapping[str, int]]) -> str:
    """How many texts there are, over the tasks and of each."""
    reported = [parts.get("report", 0) for parts in counts.values()]
    tuned = sum(parts.get("tune", 0) for parts in counts.values())
    if not reported:
        return ""
    least, most = min(reported), max(reported)
    each = str(most) if least == most else f"{least} to {most}"
    tasks = "one task" if len(reported) == 1 else f"each of {len(reported)} tasks"
    words = f"{sum(reported)} texts reported ({each} of {tasks})"
    if tuned:
        words += f", {tuned} others to tune on"
    return f"{words}; drawn by a fixed shuffle"
