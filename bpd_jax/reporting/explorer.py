"""The data of the draft explorer: texts with the lattices at all positions.

The page's script draws it from JSON in the page. The script creates text nodes and no
markup, so that nothing in a token can become an element.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from bpd_jax.reporting.records import GREEDY, EvaluationReport, Step
from bpd_jax.reporting.wording import readable, visible

_TITLE = 56


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
        position, best first; empty where no lattice was recorded.
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


def title_of(prompt: str, number: int, noun: str = "example") -> str:
    """Returns the first words of a prompt that say something, after its number.

    Args:
      prompt: text whose beginning is shown.
      number: of the example, as tables and addresses have it.
      noun: what is numbered.
    """
    lines = [line.strip() for line in prompt.splitlines() if line.strip()]
    line = visible(lines[0]) if lines else "(empty)"
    words = line if len(line) <= _TITLE else f"{line[: _TITLE - 1]}…"
    return f"{noun} {number} · {words}"


def texts_of(report: EvaluationReport) -> list[ExplorerText]:
    """The recorded prompts of an evaluation, without lattices.

    Methods that wrote the same text share an entry; one that wrote another text has an
    entry of its own. Greedy decoding, which drafts nothing, is left out.
    """
    labels = {method.name: method.label for method in report.methods}
    texts: dict[tuple[int, tuple[str, ...]], ExplorerText] = {}
    for record in report.records:
        if record.method == GREEDY:
            continue
        written = tuple(p for step in record.steps for p in step.draft[: step.accepted])
        prompt = texts.get((record.prompt_index, written))
        if prompt is None:
            key = f"prompt/{record.prompt_index + 1}"
            title = title_of(record.prompt, record.prompt_index + 1, "prompt")
            if key in {text.key for text in texts.values()}:
                key += f"/{record.method}"
                title += f" · {labels[record.method]}"
            pieces = list(dict.fromkeys(written))
            output = [pieces.index(piece) for piece in written]
            prompt = ExplorerText(
                key, "prompts", title, record.prompt, pieces, output, [], [], []
            )
            texts[record.prompt_index, written] = prompt
        prompt.traces.append(
            {
                "contender": record.method,
                "label": labels[record.method],
                "calls": _calls(record.steps, prompt.pieces),
            }
        )
    return list(texts.values())


def _calls(steps: Sequence[Step], pieces: list[str]) -> list[dict[str, Any]]:
    """Serial calls as the explorer has them; adds tokens to `pieces`."""
    calls, position = [], 0
    for step in steps:
        pieces += [piece for piece in dict.fromkeys(step.draft) if piece not in pieces]
        winner = [pieces.index(piece) for piece in step.draft]
        calls.append(
            {
                "at": position,
                "draft": [] if step.rank else winner,
                "winner": winner,
                "accepted": step.accepted,
                "rank": step.rank,
            }
        )
        position += step.accepted
    return calls


def to_json(texts: Sequence[ExplorerText]) -> str:
    """Returns JSON that an HTML page can hold: none of its characters is markup."""
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
