"""The text form of methods, and the text of `--method=help`.

    METHOD = SOURCE[+REFINER …][/SEARCH][+lookup:T], or an alias

A part is written as its name, its number if it has one, and its settings:
`heads:k=8+ngram:alpha=0.5/best:16`.
"""

import dataclasses
import difflib
import inspect
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import checks_of, fields_of, parse_value
from bpd_jax.decoding.aliases import ALIASES
from bpd_jax.decoding.methods import Method
from bpd_jax.drafting.parts import (
    Part,
    RefinerPart,
    SearchPart,
    SourcePart,
    StandalonePart,
    find_part,
    parts,
    short_text,
)

_SOURCES = (SourcePart, StandalonePart)
_LONGEST = 1000  # characters


def parse_method(text: str | Method) -> Method:
    """Parses a method; returns methods unchanged.

    >>> parse_method("ngram:16:k=8").composed
    'heads:k=8+ngram/best:16'
    """
    if isinstance(text, Method):
        return text
    if not isinstance(text, str):
        raise UserError(f"method must be a name such as ngram:16, not {text!r}.")
    text = text.strip()
    if len(text) > _LONGEST:
        raise UserError(f"a method has at most {_LONGEST} characters, not {len(text)}.")
    name, *words = text.split(":")
    if name in ALIASES and "/" not in text and "+" not in text:
        try:
            method = _use_of_alias(name, words)
        except UserError as error:
            raise UserError(f"{text!r}: {error}") from error
        return dataclasses.replace(method, text=text)
    before, slash, after = text.partition("/")
    first, *middle = before.split("+")
    search, *last = after.split("+")
    source = _part(first, text, _SOURCES)
    others = [_part(word, text, (RefinerPart, StandalonePart)) for word in middle]
    refiners = [part for part in others if isinstance(part, RefinerPart)]
    lookups = [part for part in others if isinstance(part, StandalonePart)]
    if slash and lookups:
        raise UserError(f"{text!r}: {lookups[0].name} comes after the search.")
    lookups += [_part(word, text, (StandalonePart,)) for word in last]
    if len(lookups) > 1 or any(part.name != "lookup" for part in lookups):
        raise UserError(f"{text!r}: only one lookup can follow another source.")
    found = _part(search, text, (SearchPart,)) if slash else None
    lookup: Any = lookups[0] if lookups else None
    return Method(source, refiners, found, lookup, text)


def _use_of_alias(name: str, words: list[str]) -> Method:
    alias = ALIASES[name]
    number, values = _values(name, words, _number_of(alias))
    typed = {key: _typed(value) for key, value in values.items()}
    return alias(*([] if number is None else [_typed(number)]), **typed)


def _number_of(alias: Any) -> str:
    """The name of the number of an alias, or ""."""
    first = next(iter(inspect.signature(alias).parameters.values()))
    return first.name if first.kind is first.POSITIONAL_OR_KEYWORD else ""


def _part(text: str, method: str, kinds: tuple[type[Part], ...]) -> Any:
    name, *words = text.split(":")
    part = find_part(name)
    if part is None or not issubclass(part, kinds):
        raise _unknown(name, method, kinds)
    try:
        number, values = _values(name, words, part.number_setting)
    except UserError as error:
        raise UserError(f"{method!r}: {error}") from error
    if number is not None:
        values[part.number_setting] = number
    checks = checks_of(part)
    for key in values:
        if key not in checks:
            listed = ", ".join(checks) or "no settings"
            raise UserError(
                f"{method!r}: {key!r} is not a setting of {name}, which takes {listed}."
            )
    prefix = f"{method!r}: "
    return part(**{k: parse_value(prefix + k, v, checks[k]) for k, v in values.items()})


def _values(
    name: str, words: list[str], number: str
) -> tuple[str | None, dict[str, str]]:
    """The number of a part or alias and its settings, as texts."""
    found, values = None, {}
    if words and "=" not in words[0]:
        if not number:
            raise UserError(f"{name} takes no number.")
        found, *words = words
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key in values or key == number:
            raise UserError(
                f"{word!r} is not a setting of {name}: give each once, as NAME=VALUE."
            )
        values[key] = value
    return found, values


def _typed(text: str) -> Any:
    """Converts the text of a setting to a number if it is one.

    Integers beyond those that a float holds exactly are weights, which are floats.
    """
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if abs(value) < 2**53 else float(text)
    return text


def _unknown(name: str, method: str, kinds: tuple[type[Part], ...]) -> UserError:
    """The error for an unknown name, with what may have been meant."""
    known = [known for kind in kinds for known in parts(kind)]
    close = difflib.get_close_matches(
        name, [*known, *ALIASES] if SourcePart in kinds else known, n=1
    )
    if name in parts(RefinerPart):
        hint = f"{name} is a refiner, as in heads+{name}/best:16"
    elif name in parts(SearchPart):
        hint = f"{name} is a search, as in heads+ngram/{name}"
    elif name in parts():
        hint = f"{name} is a source"
    elif close:
        hint = f"did you mean {close[0]}"
    else:
        hint = f"choose from {', '.join(known)}"
    roles = {RefinerPart: "refiner", SearchPart: "search", StandalonePart: "source"}
    role = roles.get(kinds[0], "method or source")
    return UserError(
        f"unknown method {method!r}: there is no {role} {name!r}; {hint}; "
        "--method=help lists all."
    )


def describe_methods() -> str:
    """Parts with their settings, and aliases: the text of `--method=help`."""
    lines = [
        "METHOD = SOURCE[+REFINER …][/SEARCH][+lookup:T], or an alias. A part is NAME,",
        "NAME:NUMBER, either with :SETTING=VALUE, as in heads+ngram:alpha=0.5/best:16.",
    ]
    groups: list[tuple[str, tuple[type[Part], ...]]] = [
        ("sources", _SOURCES),
        ("refiners", (RefinerPart,)),
        ("searches", (SearchPart,)),
    ]
    for title, kinds in groups:
        lines += ["", title]
        for name, part in ((k, v) for kind in kinds for k, v in parts(kind).items()):
            lines.append(f"  {name:<18}{part.help} [{part.reference}]")
            for field in fields_of(part).values():
                text = field.metadata["help"]
                if field.name == part.number_setting:
                    text += " (the number)"
                if field.default is not None and "default" not in text:
                    text += f"; default {short_text(field.default)}"
                lines.append(f"      {field.name:<14}{text}")
    lines += ["", "aliases, with the settings of their parts, lookup=T and search=NAME"]
    for name, alias in ALIASES.items():
        number = _number_of(alias)
        shown = f"{alias().composed}" + (f"; the number is {number}" if number else "")
        lines.append(f"  {name:<18}{shown}")
    return "\n".join(lines)
