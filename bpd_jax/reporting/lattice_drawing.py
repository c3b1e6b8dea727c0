"""A lattice as SVG: candidates as nodes, drafts as paths through them."""

import math
import string
from typing import Any

from markupsafe import Markup

from bpd_jax.reporting import formatting
from bpd_jax.reporting.records import Candidate, LatticePicture
from bpd_jax.reporting.templates import environment, rendered, resource

# Sizes of the drawing in pixels.
_WIDTH, _HEIGHT = 112, 28
_GAP_X, _GAP_Y = 26, 9
_TOP = 34
_PIECE_CHARACTERS = 9
_COLOURS = 4

_FIGURE = (
    '<pre class="tail" tabindex="0" aria-label="End of the text before the block">'
    "{{ picture.prompt_tail }}</pre>{{ drawing }}"
)
_PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    "<title>{{ title }}</title><style>{{ style }}</style>"
    '<main class="page"><h1>{{ title }}</h1>{{ figure }}</main></html>\n'
)


def figure(picture: LatticePicture) -> Markup:
    """Returns the end of the text before the block, and the lattice with its legend."""
    template = environment().from_string(_FIGURE)
    return Markup(template.render(picture=picture, drawing=draw(picture)))


def page(picture: LatticePicture, title: str = "Drafts in their lattice") -> str:
    """Returns a self-contained HTML page: the lattice with its legend."""
    style = Markup(resource("base.css"))
    template = environment().from_string(_PAGE)
    return template.render(title=title, style=style, figure=figure(picture))


def draw(picture: LatticePicture) -> Markup:
    """Returns the figure; column i is block position i, row r candidate r."""
    greedy = [
        next((row for row, c in enumerate(position) if c.piece == piece), len(position))
        for position, piece in zip(picture.positions, picture.greedy, strict=False)
    ]
    columns = len(picture.positions)
    rows = max([*map(len, picture.positions), *(row + 1 for row in greedy)], default=0)
    paths = "; ".join(
        f"{path.label}: {path.accepted} of {len(path.candidates)} tokens accepted"
        for path in picture.paths
    )
    return rendered(
        "lattice.svg",
        paths=[_path(picture, number) for number in range(len(picture.paths))],
        width=columns * (_WIDTH + _GAP_X) - _GAP_X + 12,
        height=_TOP + rows * (_HEIGHT + _GAP_Y),
        description=f"Lattice of {columns} positions. {paths}.",
        road=_links(greedy, 0),
        middles=[_left(column) + _WIDTH / 2 for column in range(columns)],
        nodes=_nodes(picture, greedy),
        node_width=_WIDTH,
        node_height=_HEIGHT,
    )


def _left(column: int) -> float:
    return column * (_WIDTH + _GAP_X)


def _middle(row: int) -> float:
    return _TOP + row * (_HEIGHT + _GAP_Y) + _HEIGHT / 2


def _links(rows: list[int], shift: float, begin: int = 0) -> str:
    """Curves from the right of each node to the left of the one in the next column."""
    curves = ""
    for column in range(begin, len(rows) - 1):
        x0, x1 = _left(column) + _WIDTH, _left(column + 1)
        y0, y1 = (_middle(row) + shift for row in rows[column : column + 2])
        half = (x0 + x1) / 2
        curves += f"M{x0} {y0}C{half} {y0} {half} {y1} {x1} {y1}"
    return curves


def _path(picture: LatticePicture, number: int) -> dict[str, Any]:
    """A path, and its letter at the right of its last accepted node."""
    path = picture.paths[number]
    rows, last = path.candidates, path.accepted - 1
    # Paths through the same nodes are a few pixels apart, and badges at the same node
    # are side by side.
    count = len(picture.paths)
    shift = (number - (count - 1) / 2) * min(6, 18 / count)
    before = sum(
        other.accepted == path.accepted and other.candidates[last] == rows[last]
        for other in picture.paths[:number]
    )
    return {
        "label": path.label,
        "accepted": path.accepted,
        "length": len(rows),
        "letter": string.ascii_uppercase[number % 26],
        "colour": Markup(f'style="--colour:var(--path-{number % _COLOURS})"'),
        "kept": _links(rows[: path.accepted], shift),
        "dropped": _links(rows, shift, last),
        "end_x": _left(last) + _WIDTH - 2 - 17 * before,
        "end_y": _middle(rows[last]) - _HEIGHT / 2,
    }


def _nodes(picture: LatticePicture, greedy: list[int]) -> list[dict[str, Any]]:
    """All candidates, and greedy tokens outside the lattice below them."""
    nodes = []
    for column, position in enumerate(picture.positions):
        row_of_greedy = greedy[column] if column < len(greedy) else -1
        entries: list[tuple[str, Candidate | None]] = [(c.piece, c) for c in position]
        if row_of_greedy == len(position):
            entries.append((picture.greedy[column], None))
        for row, (piece, candidate) in enumerate(entries):
            shown = formatting.visible(piece).replace(" ", "·")
            short = shown
            if len(shown) > _PIECE_CHARACTERS:
                short = shown[: _PIECE_CHARACTERS - 1] + "…"
            node = {
                "x": _left(column),
                "y": _middle(row) - _HEIGHT / 2,
                "greedy": row == row_of_greedy,
                "text": shown,
                "short": short,
                "weight": 0.0,
                "note": "absent",
                "explanation": "greedy decoding emits it, but it is not in the lattice",
            }
            if candidate is not None:
                probability = math.exp(candidate.log_prob)
                percent = 100 * probability
                node["weight"] = 0.04 + 0.5 * math.sqrt(probability)
                node["note"] = f"{percent:.0f}%" if percent >= 0.5 else "<1%"
                node["explanation"] = f"probability {probability:.3g}"
            nodes.append(node)
    return nodes
