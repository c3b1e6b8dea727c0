"""The data of the draft explorer: texts with the lattices at all positions.

The page's script reads it as JSON from the page. The script creates text nodes only, so
that no token can become markup.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from bpd_jax.reporting.formatting import readable, visible
from bpd_jax.reporting.records import GREEDY_NAME, EvaluationReport, Step

_TITLE = 56


@dataclasses.dataclass(frozen=True)
class ExplorerText:
    """One text of the explorer.

    Attributes:
      key: unique name in URLs, such as `squad/3`.
      group: heading in the list, such as the label of its task.
      title: title in the list.
      prompt: the preceding text.
      pieces: texts of the tokens that the other fields refer to by index.
      output: the text's tokens, `[T]`.
      candidates: `[T][L - 1][k]`, candidates of heads 2 … L for the block that begins
        at each position, best first; empty if no lattice was recorded.
      log_probs: log-probabilities of the candidates, in nats.
      traces: one entry per contender with `contender`, `label` and `calls`; each call
        has `at`, `draft`, `winner`, `accepted`, `rank`.
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
    """Returns a title: the number of an example, and the first words of its prompt."""
    lines = [line.strip() for line in prompt.splitlines() if line.strip()]
    line = visible(lines[0]) if lines else "(empty)"
    words = line if len(line) <= _TITLE else f"{line[: _TITLE - 1]}…"
    return f"{noun} {number} · {words}"


def texts_of(report: EvaluationReport) -> list[ExplorerText]:
    """The recorded prompts of an evaluation, without lattices.

    Methods with the same text share an entry. Greedy decoding is left out, because it
    does not draft.
    """
    labels = {method.name: method.label for method in report.methods}
    texts: dict[tuple[int, tuple[str, ...]], ExplorerText] = {}
    for record in report.records:
        if record.method == GREEDY_NAME:
            continue
        decoded = tuple(p for step in record.steps for p in step.draft[: step.accepted])
        prompt = texts.get((record.prompt_index, decoded))
        if prompt is None:
            key = f"prompt/{record.prompt_index + 1}"
            title = title_of(record.prompt, record.prompt_index + 1, "prompt")
            if key in {text.key for text in texts.values()}:
                key += f"/{record.method}"
                title += f" · {labels[record.method]}"
            pieces = list(dict.fromkeys(decoded))
            output = [pieces.index(piece) for piece in decoded]
            prompt = ExplorerText(
                key, "prompts", title, record.prompt, pieces, output, [], [], []
            )
            texts[record.prompt_index, decoded] = prompt
        prompt.traces.append(
            {
                "contender": record.method,
                "label": labels[record.method],
                "calls": _calls(record.steps, prompt.pieces),
            }
        )
    return list(texts.values())


def _calls(steps: Sequence[Step], pieces: list[str]) -> list[dict[str, Any]]:
    """Serial calls in the format of the explorer; appends new tokens to `pieces`."""
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
    """Returns JSON without characters that are markup in an HTML page."""
    data = [
        dataclasses.asdict(text)
        | {
            "prompt": readable(text.prompt),
            "pieces": [readable(piece) for piece in text.pieces],
            # Two decimal places are shown, also of sums of eight values.
            "log_probs": [
                [[round(value, 3) for value in head] for head in heads]
                for heads in text.log_probs
            ],
        }
        for text in texts
    ]
    # json.dumps escapes characters beyond ASCII, including lone surrogates.
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
