"""The words and numbers that the terminal table and the HTML report share."""

import dataclasses
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
        "most the length of a draft, which for heads is their number L. An "
        "interval, where one is given, is a bootstrap interval over the prompts."
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
    "Tokens checked": (
        "Draft tokens that one serial call checks, the mean over all calls; what "
        "drafts share counts once."
    ),
    "No gain": (
        "Share of the serial calls that accept one token, which is what plain decoding "
        "would have given."
    ),
    "Equal neighbours": (
        "Share of the neighbouring tokens of a method's best-ranked drafts that are "
        "the same token twice. Longest run: how often a token follows itself, the mean "
        "over the drafts. Independent heads repeat themselves."
    ),
    "Entropy of the heads": (
        "How unsure the block heads are, in nats, the mean over all calls: of head 2, "
        "one token past the certain one, and of the last head that drafts."
    ),
    "Interval of the gain": (
        "Paired bootstrap interval: every resample draws the same prompts for the "
        "method and for BPD. Where it leaves out zero, the gain is no accident of the "
        "prompts."
    ),
    "Wall time": (
        "Seconds for all prompts on the device named here, compilation not counted; "
        "of several rounds the median. It depends on the machine; block efficiency "
        "does not."
    ),
    "Speed-up": (
        "Wall time of greedy decoding divided by that of the method. All methods take "
        "turns in every round; this is the median of the ratios within a round."
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


def drafted(report: Report) -> list[MethodSummary]:
    """The methods that draft and say something about it."""
    return [m for m in report.methods if m.name != GREEDY and m.nodes is not None]


DRAFT_HEADINGS = (
    "Interval\nof the gain",
    "Tokens\nchecked",
    "No\ngain",
    "Equal\nneighbours",
    "Longest\nrun",
    "Entropy of\nthe heads",
)


DRAFT_CAPTION = (
    "Per serial call: draft tokens checked; calls that accept one token only; equal "
    "neighbours and runs in the best-ranked draft; entropy of head 2 … the last, in "
    "nats."
)


def draft_figures(method: MethodSummary) -> tuple[str, ...]:
    """One cell under each of `DRAFT_HEADINGS`; a dash where there is nothing to say."""
    gain = MISSING
    if method.gain_interval is not None:
        low, high = (f"{100 * bound:+.1f}" for bound in method.gain_interval)
        gain = f"{low} … {high} %".replace("-", "−")
    entropies = [f"{method.entropies[i]:.2f}" for i in (0, -1) if method.entropies]
    return (
        gain,
        _number(method.nodes, 1),
        percent(method.accepted[0] if method.accepted else None, sign=False),
        percent(method.repeated, sign=False),
        _number(method.longest_run, 2),
        " … ".join(dict.fromkeys(entropies)) or MISSING,
    )


def _number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def divergence_sentences(report: Report) -> list[str]:
    """One sentence per method whose texts are not all those of greedy decoding."""
    texts = {
        method.name: round(method.differing / method.divergence["rate"])
        for method in report.methods
        if method.divergence
    }
    return [
        f"{method.label}: {method.differing} of {texts[method.name]} texts differ from "
        "greedy decoding, the earliest at token "
        f"{method.divergence['first']:g}; where they part, the lower of the two "
        f"tokens' logits is {method.divergence['gap']:.2g} below the model's best "
        "(median)."
        for method in report.methods
        if method.divergence is not None
    ]


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


def speedup(method: MethodSummary) -> str:
    """Returns `1.31`, or a dash where nothing was timed."""
    return _number(method.speedup, 2)


def labelled(method: MethodSummary) -> str:
    """Returns the method's label, and whether `auto` chose it."""
    return f"{method.label} ← auto" if method.automatic else method.label


def fastest_method(report: Report) -> MethodSummary | None:
    """Returns the method with the greatest speed-up; None where nothing was timed."""
    timed = [m for m in report.methods if m.speedup and not m.upper_bound]
    return max(timed, key=lambda method: method.speedup or 0.0, default=None)


def fastest_sentence(report: Report) -> str:
    """Names the fastest method and its speed-up over greedy decoding.

    Example: `Fastest: tree of 16, 4-gram ← auto, 1.31 times as fast as plain
    greedy decoding.`
    """
    best = fastest_method(report)
    if best is None:
        return "No method was timed."
    if best.name != GREEDY:
        return (
            f"Fastest: {labelled(best)}, {speedup(best)} times as fast as plain "
            "greedy decoding."
        )
    others = [m for m in report.methods if m.name != GREEDY]
    rest = dataclasses.replace(report, methods=others, records=[])
    second = fastest_method(rest)
    if second is None:
        return "Fastest: plain greedy decoding."
    return (
        f"Fastest: plain greedy decoding; {second.label} comes next, with "
        f"{speedup(second)} times its speed."
    )


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
    plain = next((m.seconds for m in report.methods if m.name == GREEDY), 0.0)
    if plain and best.seconds > plain:
        sentence += f" (in {best.seconds / plain:.1f} times the wall time of greedy)"
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
