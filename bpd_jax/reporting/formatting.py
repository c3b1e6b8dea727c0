"""Formats texts and facts, for pages, LaTeX and terminals."""

from typing import Any

MISSING = "—"


def visible(piece: str) -> str:
    r"""Returns a token's text on one line, without invisible characters except spaces.

    >>> visible("x\n\t\x1b") == "x⏎⇥\\x1b"
    True
    """
    return readable(piece).replace("\n", "⏎").replace("\t", "⇥")


def readable(text: str) -> str:
    r"""Returns text with control characters escaped, newlines and tabs kept.

    >>> readable("a\n\x00") == "a\n\\x00"
    True
    """
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def percent(fraction: float | None, *, sign: bool = True) -> str:
    """Returns `+12.0 %`, or a dash for None."""
    if fraction is None:
        return MISSING
    return f"{100 * fraction:{'+' if sign else ''}.1f} %".replace("-", "−")


def fact(value: Any) -> str:
    """Returns a value on one line; the entries of a dict as `name value`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return MISSING
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {fact(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(fact, value))
    return readable(str(value))
