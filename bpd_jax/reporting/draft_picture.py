"""A picture of one block as SVG: its lattice, the plain draft and the refined draft.

It shows the recorded block in which the refined draft gains most over the plain draft
from the same position.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from bpd_jax.base.errors import UserError
from bpd_jax.reporting.explorer import ExplorerText
from bpd_jax.reporting.formatting import visible
from bpd_jax.reporting.templates import rendered

# Pixels: width of a character in the monospaced font and, at most, in the other one;
# height of a row, space between columns.
_CHARACTER, _LETTER = 7.9, 7.5
_ROW, _GAP = 27, 20
_LEFT, _TOP, _NAMES = 18, 66, 150
_PLAIN, _REFINED, _INK, _SOFT = "#b3401f", "#18794e", "#1f2328", "#8b929b"


@dataclasses.dataclass(frozen=True)
class Draft:
    """One method's draft of a block.

    Attributes:
      label: label of the method, such as `16-best 4-gram`.
      tokens: the winning draft, as indices into the text's pieces.
      accepted: number of accepted tokens.
    """

    label: str
    tokens: list[int]
    accepted: int


@dataclasses.dataclass(frozen=True)
class DraftPicture:
    """A block of a text, and two drafts of it.

    Attributes:
      text: the text, with its lattices and pieces.
      at: position at which the block begins.
      plain: the draft of the most probable tokens.
      refined: the draft of a method that rescores the lattice.
      blocks: number of blocks that it was chosen from.
    """

    text: ExplorerText
    at: int
    plain: Draft
    refined: Draft
    blocks: int


def largest_gain(
    texts: Sequence[ExplorerText], plain: str = "bpd", refined: str = "ngram:16"
) -> DraftPicture:
    """The block in which a refined draft gains most tokens over a plain one.

    Of equal gains the block with the most accepted tokens is chosen, then the first.
    """
    drafted = []
    for text in texts:
        refined_drafts = _drafts(text, refined)
        for at, draft in _drafts(text, plain).items():
            if at in refined_drafts:
                drafted.append((text, at, draft, refined_drafts[at]))
    if not drafted:
        raise UserError(
            f"no block was drafted by both {plain} and {refined}: give results with "
            "texts of the explorer, such as those of figure4."
        )
    block = max(drafted, key=lambda b: (b[3].accepted - b[2].accepted, b[3].accepted))
    return DraftPicture(*block, len(drafted))


def _drafts(text: ExplorerText, contender: str) -> dict[int, Draft]:
    """The winning drafts of a method, by position."""
    return {
        call["at"]: Draft(trace["label"], call["winner"], call["accepted"])
        for trace in text.traces
        if trace["contender"] == contender
        for call in trace["calls"]
    }


def svg(picture: DraftPicture) -> str:
    """Draws the block as a self-contained SVG file."""
    pieces = picture.text.pieces
    drafts = (picture.plain, picture.refined)
    columns = _columns(picture)
    words = [[_shown(pieces[token]) for token in column] for column in columns]
    widths = [_CHARACTER * max(map(len, column)) + 14 for column in words]
    # Not `sum`, whose rounding differs between versions of Python.
    before = itertools.accumulate(widths[:-1], initial=0.0)
    names = max(_NAMES, *(_LETTER * len(draft.label) + _GAP for draft in drafts))
    lefts = [_LEFT + names + width + _GAP * i for i, width in enumerate(before)]
    middles = [left + wide / 2 for left, wide in zip(lefts, widths, strict=True)]
    below = _TOP + _ROW * max(map(len, columns)) + 16
    chosen = [
        {draft.tokens[i] for draft in drafts if i < len(draft.tokens)}
        for i in range(len(columns))
    ]
    description = "; ".join(
        f"{draft.label}: "
        + "".join(visible(pieces[token]) for token in draft.tokens)
        + f" ({draft.accepted} tokens accepted)"
        for draft in drafts
    )
    note = (
        "Green: accepted in one pass; struck: rejected. Accepted: "
        f"{picture.plain.accepted} unrefined, {picture.refined.accepted} refined, of "
        f"{len(columns)}: the largest gain among {picture.blocks:,} blocks."
    )
    text = rendered(
        "draft_picture.svg",
        width=max(lefts[-1] + widths[-1], _LEFT + _LETTER * len(note)) + _LEFT,
        height=below + 2 * _ROW + 22,
        left=_LEFT,
        top=_TOP,
        row=_ROW,
        ink=_INK,
        soft=_SOFT,
        good=_REFINED,
        description=description,
        columns=[
            {
                "left": lefts[i],
                "middle": middles[i],
                "width": widths[i],
                "cells": [
                    (word, token in chosen[i])
                    for word, token in zip(words[i], column, strict=True)
                ],
            }
            for i, column in enumerate(columns)
        ],
        drafts=[
            {
                "label": draft.label,
                "colour": colour,
                "y": below + _ROW * number + 14,
                "points": [
                    (x, _TOP + _ROW * (column.index(token) + 0.5))
                    for token, column, x in zip(
                        draft.tokens, columns, middles, strict=False
                    )
                ],
                "tokens": [
                    (_shown(pieces[token]), x, i < draft.accepted)
                    for i, (token, x) in enumerate(
                        zip(draft.tokens, middles, strict=False)
                    )
                ],
            }
            for number, (draft, colour) in enumerate(
                zip(drafts, (_PLAIN, _REFINED), strict=True)
            )
        ],
        note=note,
    )
    return f"{text}\n"


def _columns(picture: DraftPicture) -> list[list[int]]:
    """The tokens of each column: the certain token, then the candidates of each head.

    A token of a draft that is not among the recorded candidates comes last.
    """
    first = picture.plain.tokens[0]
    columns = [[first], *map(list, picture.text.candidates[picture.at])]
    for draft in (picture.plain, picture.refined):
        for column, token in zip(columns, draft.tokens, strict=False):
            if token not in column:
                column.append(token)
    return columns


def _shown(piece: str) -> str:
    """A token on one line, without the space before a word."""
    text = visible(piece)
    return text.strip() or text.replace(" ", "␣")
