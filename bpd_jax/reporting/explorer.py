"""The draft explorer: texts with every lattice along them, to be stepped through.

The page's script draws it, from data that stand in the page as JSON. It makes text
nodes of them and no markup, so nothing in a token can become an element.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

from bpd_jax.reporting.wording import escaped, readable, visible

_TITLE = 56
_HELP = (
    "Pick a text and a method, and step through its serial calls with the buttons or "
    "the left and right arrow keys. Green tokens of a draft were accepted, struck ones "
    "rejected; the first is the model’s own and certain. The lattice has what every "
    "head proposed at that position."
)


@dataclasses.dataclass(frozen=True)
class ExplorerText:
    """One text of the explorer.

    Attributes:
      key: names it in addresses, such as `squad/3`.
      group: that it is listed under, such as the label of its task.
      title: in the list.
      prompt: text before it.
      pieces: texts of tokens that the other fields point to.
      output: the text's tokens.
      candidates: `[T][L - 1][k]`, of heads 2 … L for the block that begins at each
        position, best first.
      log_probs: of the candidates, in nats.
      traces: of every contender: `contender`, `label` and `calls`, each of which has
        `at`, `draft`, `winner`, `accepted`, `rank`.
    """

    key: str
    group: str
    title: str
    prompt: str
    pieces: list[str]
    output: list[int]
    candidates: list[list[list[int]]]
    log_probs: list[list[list[float]]]
    traces: list[dict[str, Any]]


def title_of(prompt: str, number: int) -> str:
    """Returns the first words of a prompt that say something, after its number.

    Args:
      prompt: text whose beginning is shown.
      number: of the example, as tables and addresses have it.
    """
    lines = [line.strip() for line in prompt.splitlines() if line.strip()]
    line = visible(lines[0]) if lines else "(empty)"
    words = line if len(line) <= _TITLE else f"{line[: _TITLE - 1]}…"
    return f"example {number} · {words}"


def section(texts: Sequence[ExplorerText]) -> str:
    """Returns the body of the section, or nothing if there are no texts."""
    if not texts:
        return ""
    groups = itertools.groupby(enumerate(texts), lambda pair: pair[1].group)
    options = "".join(
        f'<optgroup label="{escaped(group)}">'
        + "".join(
            f'<option value="{index}">{escaped(text.title)}</option>'
            for index, text in members
        )
        + "</optgroup>"
        for group, members in groups
    )
    return (
        f"<p>{_HELP}</p>"
        "<noscript><p class=notice>The explorer needs the page’s script; everything "
        "else is readable without it.</p></noscript>"
        '<div id="explorer" class="explorer">'
        '<form class="controls" autocomplete="off"><div>'
        '<label class="name" for="text">Text</label>'
        f'<select id="text" name="text">{options}</select></div>'
        '<fieldset><legend>Method</legend><div class="choices" id="contenders"></div>'
        "</fieldset></form>"
        '<div class="stage card">'
        '<div class="steer"><div class="buttons">'
        + "".join(
            f'<button type="button" id="{name}" title="{words}" aria-label="{words}">'
            '<svg width="16" height="14" aria-hidden="true">'
            f'<path d="{sign}"/></svg></button>'
            for name, sign, words in [
                ("first", "M2 1h2v12h-2zM14 1v12L5 7z", "First call"),
                ("previous", "M12 1v12L3 7z", "Previous call (left arrow)"),
                ("next", "M4 1v12L13 7z", "Next call (right arrow)"),
                ("last", "M12 1h2v12h-2zM2 1v12L11 7z", "Last call"),
            ]
        )
        + '<button type="button" id="play" aria-pressed="false">Play</button></div>'
        '<input type="range" id="step" min="1" value="1" aria-label="Serial call">'
        '<p id="where" aria-live="polite"></p></div>'
        '<svg id="strip" class="strip" role="img" preserveAspectRatio="none"></svg>'
        '<div id="call"></div></div></div>'
        f'<script type="application/json" id="texts">{_json(texts)}</script>'
    )


def _json(texts: Sequence[ExplorerText]) -> str:
    """JSON that an HTML page can hold: no character of it means anything there."""
    data = [
        dataclasses.asdict(text)
        | {
            "prompt": readable(text.prompt),
            "pieces": [readable(piece) for piece in text.pieces],
            # Two decimal places are shown; a sum of eight should have them right.
            "log_probs": [
                [[round(value, 3) for value in head] for head in heads]
                for heads in text.log_probs
            ],
        }
        for text in texts
    ]
    # Beyond ASCII json.dumps writes escapes, lone surrogates included.
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
