"""Converts results of an evaluation to the records of a report."""

import statistics
from collections.abc import Sequence

import numpy as np

from bpd_jax.decoding.compare import MethodResult, divergence
from bpd_jax.decoding.methods import Method
from bpd_jax.evaluation.block_views import BlockView
from bpd_jax.evaluation.draft_statistics import draft_statistics
from bpd_jax.evaluation.efficiency import (
    block_efficiency,
    bootstrap_interval,
    paired_interval,
)
from bpd_jax.reporting.decode_records import Decode, Piece
from bpd_jax.reporting.records import (
    GREEDY_NAME,
    Candidate,
    LatticePicture,
    MethodSummary,
    Path,
)


def summaries(
    results: Sequence[MethodResult], automatic: Method | None = None
) -> list[MethodSummary]:
    """One row of the table per method.

    Args:
      results: one result per method.
      automatic: the method that `auto` chose, which is marked.
    """
    plain = {r.method.name: r.generations for r in results}.get("bpd")
    base = block_efficiency(plain) if plain else 0.0
    greedy = next((r for r in results if r.method.name == GREEDY_NAME), None)
    rows = []
    for result in results:
        efficiency = block_efficiency(result.generations)
        compared = base and result.method.name not in ("greedy", "bpd")
        drafts = draft_statistics(result.generations)
        rows.append(
            MethodSummary(
                name=result.method.name,
                label=result.label,
                block_efficiency=efficiency,
                serial_calls=sum(g.serial_calls for g in result.generations),
                tokens=sum(len(g.output_ids) for g in result.generations),
                seconds=(
                    statistics.median(result.seconds)
                    if result.seconds
                    else sum(g.seconds for g in result.generations)
                ),
                speedup=None if greedy is None else result.speedup(greedy),
                gain=efficiency / base - 1 if compared else None,
                gain_interval=paired_interval(result.generations, plain)
                if compared and plain
                else None,
                divergence=divergence(result.differences, len(result.generations)),
                nodes=drafts.nodes,
                repeated=drafts.repeated,
                longest_run=drafts.longest_run,
                entropies=list(drafts.entropies),
                accepted=list(drafts.accepted),
                differing=len(result.differences),
                near_ties=len(result.differences) - len(result.errors),
                interval=bootstrap_interval(result.generations),
                upper_bound=result.method.is_oracle,
                note=_why_one(result),
                automatic=result.method == automatic,
            )
        )
    return rows


def _why_one(result: MethodResult) -> str:
    """Why a method that drafts emits one token in every serial call; usually ""."""
    generations = result.generations
    if result.method.name == GREEDY_NAME or block_efficiency(generations) > 1:
        return ""
    longest = max(len(generation.output_ids) for generation in generations)
    if longest < 2:
        return (
            "1.00, because no text is longer than one token, and the first token of a "
            "call is never drafted (a finetuned model ends its text at once if "
            "--prompt_tokens cuts the inputs of its task)"
        )
    return (
        f"1.00, because none of its drafted tokens was accepted, in texts of up to "
        f"{longest} tokens: its drafter does not fit these texts"
    )


def lattice_picture(
    view: BlockView, decode: Decode, piece: Piece, rows: int | None = None
) -> LatticePicture:
    """The records of one lattice; the certain position keeps its one candidate.

    Args:
      decode, piece: give the text of tokens and of one token.
      rows: candidates of each position that are kept; all by default.
    """
    positions = [
        [
            Candidate(piece(token), float(log_prob))
            for token, log_prob in zip(column, scores, strict=True)
            if np.isfinite(log_prob)
        ][:rows]
        for column, scores in zip(view.tokens, view.log_probs, strict=True)
    ]
    return LatticePicture(
        prompt_tail=decode(view.text[-24:].tolist()),
        positions=positions,
        paths=[Path(p.label, p.candidates, p.accepted) for p in view.paths],
        greedy=[piece(token) for token in view.greedy if token >= 0],
    )
