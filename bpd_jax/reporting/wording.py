"""The words and numbers that the terminal table and the HTML report share."""

import html
from typing import Any

from bpd_jax.reporting.records import GREEDY, MethodSummary, Report

MISSING = "—"

DEFINITIONS = {
    "Serial call": (
        "One pass of the model inside the decode loop. It checks a whole draft at "
        "once; the prefill of the prompt is not counted."
    ),
    "Block efficiency": (
        "Decoded tokens divided by serial calls: 1 for greedy decoding, at "
        "most the number of block heads L. An interval, where one is given, is a "
        "bootstrap interval over the prompts."
    ),
    "Gain over BPD": (
        "Block efficiency divided by that of blockwise parallel decoding with "
        "independent heads (BPD), minus one."
    ),
    "Output": (
        "Compared with plain greedy decoding, token for token. Identical: "
        "every prompt gave the same tokens. Near-tie: the first difference is where "
        "the model's two best tokens are equal up to rounding. Different: anything "
        "else."
    ),
    "Wall time": (
        "Seconds for all prompts on the device named here. It depends on the "
        "machine; block efficiency does not."
    ),
}


def visible(piece: str) -> str:
    r"""Returns a token's text on one line, with nothing invisible but spaces.

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


def escaped(text: str) -> str:
    """Returns text for an HTML page: every text that goes there passes here.

    >>> escaped("a < b")
    'a &lt; b'
    """
    return html.escape(readable(text))


def percent(fraction: float | None, *, sign: bool = True) -> str:
    """Returns `+12.0 %`, or a dash for None."""
    if fraction is None:
        return MISSING
    return f"{100 * fraction:{'+' if sign else ''}.1f} %".replace("-", "−")


def seconds(value: float) -> str:
    """Returns seconds with three significant digits, or whole above 100.

    >>> seconds(0.01234), seconds(3.14159), seconds(1234.5)
    ('0.0123', '3.14', '1,234')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def interval(method: MethodSummary) -> str:
    """Returns `1.52–1.64`, or nothing where no interval was computed."""
    if method.interval is None:
        return ""
    low, high = method.interval
    return f"{low:.2f}–{high:.2f}"


def verdict(method: MethodSummary) -> str:
    """Says how the outputs compare with greedy decoding, in two words."""
    if method.name == GREEDY:
        return "reference"
    if method.identical:
        return "identical ✓"
    if method.agreement == "different":
        return f"{method.differing - method.near_ties} DIFFERENT"
    return f"{method.near_ties} near-tie" + "s" * (method.near_ties > 1)


def fact(value: Any) -> str:
    """Returns a named value as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return MISSING
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(fact, value))
    return readable(str(value))


def best_method(report: Report) -> MethodSummary | None:
    """Returns the real method with the highest block efficiency."""
    return max(
        (method for method in report.methods if not method.upper_bound),
        key=lambda method: method.block_efficiency,
        default=None,
    )


def summary_sentence(report: Report) -> str:
    """Returns the result in one sentence of plain words.

    Example: `16-best 4-gram: 1.58 tokens per serial call, 12.0 % above BPD; outputs
    identical for all methods.`
    """
    best = best_method(report)
    if best is None:
        return "No method was measured."
    sentence = f"{best.label}: {best.block_efficiency:.2f} tokens per serial call"
    if best.gain:
        side = "above" if best.gain > 0 else "below"
        sentence += f", {percent(abs(best.gain), sign=False)} {side} BPD"
    different = [m.label for m in report.methods if m.agreement == "different"]
    near_ties = sum(method.near_ties for method in report.methods)
    if different:
        return f"{sentence}; outputs DIFFER from greedy decoding for " + (
            ", ".join(different) + "."
        )
    if near_ties:
        word = "near-tie" if near_ties == 1 else "near-ties"
        return f"{sentence}; outputs identical but for {near_ties} {word}."
    return f"{sentence}; outputs identical for all methods."
