"""Sentences about an evaluation: best and fastest method, differences between texts."""

import dataclasses

from bpd_jax.reporting.records import GREEDY_NAME, EvaluationReport, MethodSummary
from bpd_jax.reporting.wording import percent


def drafting_methods(report: EvaluationReport) -> list[MethodSummary]:
    """The methods that draft and have statistics of their drafts."""
    return [m for m in report.methods if m.name != GREEDY_NAME and m.nodes is not None]


def divergence_sentences(report: EvaluationReport) -> list[str]:
    """One sentence per method with texts that differ from greedy decoding."""
    return [
        f"{method.label}: {method.differing} of "
        f"{round(method.differing / method.divergence['rate'])} texts differ from "
        f"greedy decoding, the earliest at token {method.divergence['first']:g}; at "
        "the first difference, the lower of the two tokens' logits is "
        f"{method.divergence['gap']:.2g} below the model's largest logit (median)."
        for method in report.methods
        if method.divergence is not None
    ]


def verdict(method: MethodSummary) -> str:
    """Summarises how the outputs compare with greedy decoding."""
    if method.name == GREEDY_NAME:
        return "reference"
    if method.identical:
        return "identical ✓"
    if method.agreement == "different":
        return f"{method.differing - method.near_ties} DIFFERENT"
    return f"{method.near_ties} near-tie" + "s" * (method.near_ties > 1)


def labelled(method: MethodSummary) -> str:
    """Returns the method's label, marked if `auto` chose the method."""
    return f"{method.label} ← auto" if method.automatic else method.label


def fastest_method(report: EvaluationReport) -> MethodSummary | None:
    """Returns the method with the largest speed-up; None if nothing was timed."""
    timed = [m for m in report.methods if m.speedup and not m.upper_bound]
    return max(timed, key=lambda method: method.speedup or 0.0, default=None)


def fastest_sentence(report: EvaluationReport) -> str:
    """Returns a sentence about the fastest method and its speed-up.

    Example: `Fastest: tree of 16, 4-gram ← auto, 1.31 times as fast as plain
    greedy decoding.`
    """
    best = fastest_method(report)
    if best is None:
        return "No method was timed."
    if best.name != GREEDY_NAME:
        return (
            f"Fastest: {labelled(best)}, {best.speedup:.2f} times as fast as plain "
            "greedy decoding."
        )
    drafting = [m for m in report.methods if m.name != GREEDY_NAME]
    without_greedy = dataclasses.replace(report, methods=drafting, records=[])
    second = fastest_method(without_greedy)
    if second is None:
        return "Fastest: plain greedy decoding."
    return (
        f"Fastest: plain greedy decoding; the next is {second.label}, "
        f"{second.speedup:.2f} times as fast."
    )


def best_method(report: EvaluationReport) -> MethodSummary | None:
    """Returns the method with the highest block efficiency, except upper bounds."""
    return max(
        (method for method in report.methods if not method.upper_bound),
        key=lambda method: method.block_efficiency,
        default=None,
    )


def summary_sentence(report: EvaluationReport) -> str:
    """Returns a summary of the results in one sentence.

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
    plain = next((m.seconds for m in report.methods if m.name == GREEDY_NAME), 0.0)
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
