"""A lattice as inline SVG: candidates as nodes, drafts as paths through them."""

import importlib.resources
import math
import string

from bpd_jax.reporting import wording
from bpd_jax.reporting.records import LatticePicture
from bpd_jax.reporting.wording import escaped

# Sizes in pixels of the drawing.
_WIDTH, _HEIGHT = 112, 28
_GAP_X, _GAP_Y = 26, 9
_TOP = 34
_PIECE_CHARACTERS = 9
_COLOURS = 4


def figure(picture: LatticePicture) -> str:
    """Returns the end of the text before the block, and the lattice with its legend."""
    return (
        '<pre class="tail" tabindex="0" aria-label="End of the text before the block">'
        f"{escaped(picture.prompt_tail)}</pre>"
        f'<figure class="card lattice">{_legend(picture)}'
        '<div class="scroll" role="region" aria-label="Lattice, scrolls sideways" '
        f'tabindex="0">{draw(picture)}</div></figure>'
    )


def page(picture: LatticePicture, title: str = "Drafts in their lattice") -> str:
    """Returns a self-contained HTML page: the lattice and the names of its paths."""
    folder = importlib.resources.files("bpd_jax.reporting")
    style = (folder / "base.css").read_text(encoding="utf-8")
    names = "".join(
        f'<li><svg width="44" height="20" aria-hidden="true" {_colour(number)}>'
        f'<path class="path" d="M0 10H44"/>{_badge(number, 22, 10)}</svg>'
        f"<span>{escaped(path.label)}</span></li>"
        for number, path in enumerate(picture.paths)
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{style}</style>"
        f'<main class="page"><h1>{escaped(title)}</h1>'
        f'<pre class="tail">{escaped(picture.prompt_tail)}</pre>'
        f'<figure class="card lattice"><ul class="legend">{names}</ul>'
        f'<div class="scroll">{draw(picture)}</div></figure></main></html>\n'
    )


def draw(picture: LatticePicture) -> str:
    """Returns the SVG element; column i is block position i, row r candidate r."""
    greedy = _greedy_rows(picture)
    rows = max([*map(len, picture.positions), *(row + 1 for row in greedy)], default=0)
    width = len(picture.positions) * (_WIDTH + _GAP_X) - _GAP_X + 12
    height = _TOP + rows * (_HEIGHT + _GAP_Y)
    shapes = [_road(greedy), *_headings(picture)]
    shapes.extend(_path(picture, number) for number in range(len(picture.paths)))
    for column, position in enumerate(picture.positions):
        for row, candidate in enumerate(position):
            shapes.append(
                _node(
                    column,
                    row,
                    candidate.piece,
                    math.exp(candidate.log_prob),
                    greedy=column < len(greedy) and greedy[column] == row,
                )
            )
        if column < len(greedy) and greedy[column] == len(position):
            shapes.append(
                _node(column, len(position), picture.greedy[column], None, greedy=True)
            )
    shapes.extend(
        _acceptance_badge(picture, number) for number in range(len(picture.paths))
    )
    return (
        f'<svg viewBox="-2 0 {width} {height}" width="{width}" role="img" '
        f'style="min-width:{0.85 * width:.0f}px" aria-label="{_description(picture)}">'
        + "".join(shapes)
        + "</svg>"
    )


def _greedy_rows(picture: LatticePicture) -> list[int]:
    """Returns the row of every greedy token; one below the last if it is not there."""
    return [
        next((row for row, c in enumerate(position) if c.piece == piece), len(position))
        for position, piece in zip(picture.positions, picture.greedy, strict=False)
    ]


def _description(picture: LatticePicture) -> str:
    paths = "; ".join(
        f"{path.label}: {path.accepted} of {len(path.candidates)} tokens accepted"
        for path in picture.paths
    )
    return escaped(f"Lattice of {len(picture.positions)} positions. {paths}.")


def _legend(picture: LatticePicture) -> str:
    items = "".join(
        f'<li><svg width="44" height="20" aria-hidden="true" {_colour(number)}>'
        f'<path class="path" d="M0 10H44"/>{_badge(number, 22, 10)}</svg>'
        f"<span>{escaped(path.label)}: {path.accepted} of {len(path.candidates)} "
        "accepted</span></li>"
        for number, path in enumerate(picture.paths)
    )
    return (
        f'<ul class="legend" aria-label="Legend">{items}'
        '<li><svg width="44" height="20" aria-hidden="true">'
        '<path class="road" d="M0 10H44"/></svg><span>greedy decoding</span></li></ul>'
    )


def _colour(number: int) -> str:
    return f'style="--colour:var(--path-{number % _COLOURS})"'


def _left(column: int) -> float:
    return column * (_WIDTH + _GAP_X)


def _middle(row: int) -> float:
    return _TOP + row * (_HEIGHT + _GAP_Y) + _HEIGHT / 2


def _headings(picture: LatticePicture) -> list[str]:
    return [
        f'<text class="soft" x="{_left(column) + _WIDTH / 2}" y="16" '
        f'text-anchor="middle">head {column + 1}{"" if column else " · certain"}</text>'
        for column in range(len(picture.positions))
    ]


def _link(column: int, row: int, next_row: int, shift: float) -> str:
    """A curve from the right of one node to the left of one in the next column."""
    x0, x1 = _left(column) + _WIDTH, _left(column + 1)
    y0, y1 = _middle(row) + shift, _middle(next_row) + shift
    half = (x0 + x1) / 2
    return f"M{x0} {y0}C{half} {y0} {half} {y1} {x1} {y1}"


def _road(rows: list[int]) -> str:
    """The band of greedy decoding, behind everything."""
    curves = "".join(
        _link(column, row, rows[column + 1], 0) for column, row in enumerate(rows[:-1])
    )
    return f'<path class="road" d="{curves}"/>'


def _shift(picture: LatticePicture, number: int) -> float:
    """Keeps paths that share their nodes a few pixels apart."""
    return (number - (len(picture.paths) - 1) / 2) * min(6, 18 / len(picture.paths))


def _path(picture: LatticePicture, number: int) -> str:
    path = picture.paths[number]
    links = [
        _link(column, row, path.candidates[column + 1], _shift(picture, number))
        for column, row in enumerate(path.candidates[:-1])
    ]
    solid = path.accepted - 1
    return (
        f"<g {_colour(number)}>"
        f'<path class="path" d="{"".join(links[:solid])}"/>'
        f'<path class="path rejected" d="{"".join(links[solid:])}"/></g>'
    )


def _acceptance_badge(picture: LatticePicture, number: int) -> str:
    """The path's letter at the right of its last accepted node."""
    path = picture.paths[number]
    column = path.accepted - 1
    # Badges that meet at one node stand side by side.
    before = sum(
        other.accepted == path.accepted
        and other.candidates[column] == path.candidates[column]
        for other in picture.paths[:number]
    )
    x = _left(column) + _WIDTH - 2 - 17 * before
    y = _middle(path.candidates[column]) - _HEIGHT / 2
    return f"<g {_colour(number)}>{_badge(number, x, y)}</g>"


def _badge(number: int, x: float, y: float) -> str:
    letter = string.ascii_uppercase[number % 26]
    return (
        f'<g class="badge"><circle cx="{x}" cy="{y}" r="8"/>'
        f'<text x="{x}" y="{y + 3.7}">{letter}</text></g>'
    )


def _node(
    column: int, row: int, piece: str, probability: float | None, *, greedy: bool
) -> str:
    """One candidate; without a probability, a greedy token outside the lattice."""
    x, y = _left(column), _middle(row) - _HEIGHT / 2
    shown = wording.visible(piece).replace(" ", "·")
    if probability is None:
        note, full = "absent", "greedy decoding emits it, but it is not in the lattice"
        style, weight = " outside", 0.0
    else:
        note = f"{100 * probability:.0f}%" if probability >= 0.005 else "<1%"
        full = f"probability {probability:.3g}"
        style, weight = "", 0.04 + 0.5 * math.sqrt(probability)
    short = (
        shown
        if len(shown) <= _PIECE_CHARACTERS
        else shown[: _PIECE_CHARACTERS - 1] + "…"
    )
    box = f'x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="7"'
    return (
        f'<g class="node{" greedy" if greedy else ""}{style}">'
        f"<title>{escaped(shown)}: {full}</title>"
        f'<rect class="plate" {box}/><rect {box} style="--weight:{weight:.3f}"/>'
        f'<text class="mono" x="{x + 9}" y="{y + 18}">{escaped(short)}</text>'
        f'<text class="soft" x="{x + _WIDTH - 8}" y="{y + 18}" text-anchor="end" '
        f'style="font-size:10.5px">{escaped(note)}</text></g>'
    )
