"""A picture of one block: its lattice, the plain draft and the refined one, as SVG.

It shows the block of all recorded texts in which the refined draft gains most over the
plain one, both drafted from the same position.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from bpd_jax.errors import UserError
from bpd_jax.reporting.explorer import ExplorerText
from bpd_jax.reporting.wording import escaped, visible

# Pixels: of a character of the fixed-width font, a row, the space between columns.
_CHARACTER, _ROW, _GAP = 7.9, 27, 20
_LEFT, _TOP, _NAMES = 18, 66, 150
_PLAIN, _REFINED, _INK, _SOFT = "#b3401f", "#18794e", "#1f2328", "#8b929b"


@dataclasses.dataclass(frozen=True)
class Draft:
    """One method's draft of a block.

    Attributes:
      label: of the method, such as `16-best 4-gram`.
      tokens: the draft that won, as indices into the text's pieces.
      accepted: how many of them are right, from the first on.
    """

    label: str
    tokens: list[int]
    accepted: int


@dataclasses.dataclass(frozen=True)
class DraftPicture:
    """A block of a text, and two drafts of it.

    Attributes:
      text: with the lattice and the texts of tokens.
      at: where the block begins.
      plain: the most probable token of every head.
      refined: of a method that rescores the lattice.
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
    """The block in which a refined draft has most tokens more right than a plain one.

    Args:
      texts: with the traces of both methods.
      plain: name of a method.
      refined: name of another one.

    Raises:
      UserError: no block was drafted by both methods.
    """
    blocks = [
        (text, at, _draft(text, plain, one), _draft(text, refined, other))
        for text in texts
        for at, one in _calls(text, plain).items()
        if (other := _calls(text, refined).get(at)) is not None
    ]
    if not blocks:
        raise UserError(
            f"there is no block that both {plain} and {refined} drafted: give results "
            "with texts of the explorer, such as those of figure4."
        )
    best = max(blocks, key=lambda block: block[3].accepted - block[2].accepted)
    return DraftPicture(*best, blocks=len(blocks))


def _calls(text: ExplorerText, contender: str) -> dict[int, dict[str, Any]]:
    """The calls of a method, by position."""
    return {
        call["at"]: call
        for trace in text.traces
        if trace["contender"] == contender
        for call in trace["calls"]
    }


def _draft(text: ExplorerText, contender: str, call: dict[str, Any]) -> Draft:
    label = next(t["label"] for t in text.traces if t["contender"] == contender)
    return Draft(label, list(call["winner"]), call["accepted"])


def svg(picture: DraftPicture) -> str:
    """Draws the block; the file needs nothing but itself."""
    columns = _columns(picture)
    words = [[_shown(picture.text.pieces[token]) for token in c] for c in columns]
    widths = [_CHARACTER * max(map(len, column)) + 14 for column in words]
    lefts = [_LEFT + _NAMES + sum(widths[:i]) + _GAP * i for i in range(len(widths))]
    width = lefts[-1] + widths[-1] + _LEFT
    rows = max(map(len, columns))
    below = _TOP + _ROW * rows + 16
    height = below + 2 * _ROW + 22
    middles = [left + wide / 2 for left, wide in zip(lefts, widths, strict=True)]
    shapes = [
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#ffffff"/>',
        _text(_LEFT, 26, "What each head proposes, most probable first", weight=600),
        *(
            _text(x, _TOP - 16, f"head {number}", colour=_SOFT, anchor="middle")
            for number, x in enumerate(middles, 1)
        ),
        *(_path(draft, columns, middles, colour) for draft, colour in _drafts(picture)),
    ]
    chosen = [
        {draft.tokens[i] for draft, _ in _drafts(picture) if i < len(draft.tokens)}
        for i in range(len(columns))
    ]
    for i, column in enumerate(columns):
        for row, token in enumerate(column):
            shapes += _cell(
                words[i][row], lefts[i], row, widths[i], token in chosen[i], middles[i]
            )
    for number, (draft, colour) in enumerate(_drafts(picture)):
        y = below + _ROW * number + 14
        shapes.append(_text(_LEFT, y, draft.label, colour=colour, weight=600))
        shapes += [
            _verdict(_shown(picture.text.pieces[token]), x, y, i < draft.accepted)
            for i, (token, x) in enumerate(zip(draft.tokens, middles, strict=False))
        ]
    note = (
        "Green: accepted by the model in one pass; struck: rejected. "
        f"{picture.plain.label} {picture.plain.accepted}, {picture.refined.label} "
        f"{picture.refined.accepted} of {len(columns)} tokens, the largest gain among "
        f"{picture.blocks:,} blocks."
    )
    shapes.append(_text(_LEFT, height - 12, note, colour=_SOFT))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{escaped(_description(picture))}">{"".join(shapes)}</svg>\n'
    )


def _drafts(picture: DraftPicture) -> list[tuple[Draft, str]]:
    return [(picture.plain, _PLAIN), (picture.refined, _REFINED)]


def _columns(picture: DraftPicture) -> list[list[int]]:
    """The tokens of each column: the certain first one, then what each head proposes.

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
    """A token on one line; a space before a word is left out."""
    text = visible(piece)
    return text.strip() or text.replace(" ", "␣")


def _description(picture: DraftPicture) -> str:
    texts = [
        f"{draft.label}: "
        + "".join(visible(picture.text.pieces[token]) for token in draft.tokens)
        + f" ({draft.accepted} tokens accepted)"
        for draft, _ in _drafts(picture)
    ]
    return "; ".join(texts)


def _path(
    draft: Draft, columns: list[list[int]], middles: list[float], colour: str
) -> str:
    """A line through the tokens of a draft."""
    points = " ".join(
        f"{x:.1f},{_TOP + _ROW * (column.index(token) + 0.5):.1f}"
        for token, column, x in zip(draft.tokens, columns, middles, strict=False)
    )
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" '
        'stroke-width="5" stroke-opacity="0.35" stroke-linejoin="round"/>'
    )


def _cell(
    text: str, left: float, row: int, width: float, chosen: bool, middle: float
) -> list[str]:
    y = _TOP + _ROW * row
    ink = _INK if chosen else _SOFT
    box = (
        f'<rect x="{left:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 4}" '
        f'rx="5" fill="#ffffff" stroke="{"#d0d7de" if chosen else "none"}"/>'
    )
    shape = _text(middle, y + 18, text, colour=ink, anchor="middle", mono=True)
    return [box, shape] if chosen else [shape]


def _verdict(text: str, x: float, y: float, accepted: bool) -> str:
    return _text(
        x,
        y,
        text,
        colour=_REFINED if accepted else _SOFT,
        anchor="middle",
        mono=True,
        weight=600 if accepted else 400,
        struck=not accepted,
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    colour: str = _INK,
    anchor: str = "start",
    mono: bool = False,
    weight: int = 400,
    struck: bool = False,
) -> str:
    family = "ui-monospace, Menlo, monospace" if mono else "system-ui, sans-serif"
    line = ' text-decoration="line-through"' if struck else ""
    return (
        f'<text x="{x:.1f}" y="{y:g}" fill="{colour}" text-anchor="{anchor}" '
        f'font-family="{family}" font-size="13" font-weight="{weight}"{line}>'
        f"{escaped(text)}</text>"
    )
