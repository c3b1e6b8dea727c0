"""The text of `--method=help`."""

from bpd_jax.base.settings import fields_of
from bpd_jax.decoding.aliases import ALIASES, AUTO
from bpd_jax.drafting.parts import (
    Part,
    RefinerPart,
    SearchPart,
    SourcePart,
    StandalonePart,
    parts,
    short_text,
)


def describe_methods() -> str:
    """Parts with their settings, and aliases."""
    lines = [
        "METHOD = SOURCE[+REFINER …][/SEARCH][+lookup:T], or an alias. A part is NAME,",
        "NAME:NUMBER, either with :SETTING=VALUE, as in heads+ngram:alpha=0.5/best:16.",
    ]
    groups: list[tuple[str, tuple[type[Part], ...]]] = [
        ("sources", (SourcePart, StandalonePart)),
        ("refiners", (RefinerPart,)),
        ("searches", (SearchPart,)),
    ]
    for title, kinds in groups:
        lines += ["", title]
        for kind in kinds:
            for name, part in parts(kind).items():
                lines.append(f"  {name:<18}{part.help} [{part.reference}]")
                for field in fields_of(part).values():
                    text = field.metadata["help"]
                    if field.name == part.number_setting:
                        text += " (the number)"
                    if field.default is not None and "default" not in text:
                        text += f"; default {short_text(field.default)}"
                    lines.append(f"      {field.name:<14}{text}")
    lines += ["", "aliases"]
    for name, alias in ALIASES.items():
        lines.append(f"  {name:<18}{alias.composed}")
    lines.append(f"  {AUTO:<18}the fastest method on this device, by measurement")
    return "\n".join(lines)
