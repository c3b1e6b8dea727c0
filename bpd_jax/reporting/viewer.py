"""The draft viewer of the HTML report: every step of every decoded prompt."""

import re

from bpd_jax.reporting import wording
from bpd_jax.reporting.records import DecodeRecord, Report, Step
from bpd_jax.reporting.wording import escaped

_LEGEND = (
    '<ul class="legend" aria-label="Legend">'
    '<li><ins class="certain">token</ins> certain: the model’s own next token</li>'
    "<li><ins>token</ins> drafted and accepted</li>"
    "<li><del>token</del> drafted and rejected</li></ul>"
)


def drafts(report: Report) -> str:
    """Returns the body of the section, or nothing if there are no records.

    Without the page's script the first prompt is visible under every method.
    """
    if not report.records:
        return ""
    labels = {method.name: method.label for method in report.methods}
    first = report.records[0].prompt_index
    articles = "".join(
        _article(record, labels[record.method], hidden=record.prompt_index != first)
        for record in report.records
    )
    return (
        "<p>Each row is one serial call: the draft that was checked, and how much of "
        "it the model accepted. In the decoded text, the shading changes with "
        "every serial call. · is a space, ⏎ a newline, ⇥ a tab.</p>"
        + _controls(report, labels)
        + _LEGEND
        + f'{articles}<p class="no-record card" hidden>This prompt was not recorded '
        "for this method.</p>"
    )


def _controls(report: Report, labels: dict[str, str]) -> str:
    """The choice of prompt and method; the highest block efficiency is preset."""
    prompts = {record.prompt_index: record.prompt for record in report.records}
    options = "".join(
        f'<option value="{index}">{index + 1} · {escaped(_title(prompt))}</option>'
        for index, prompt in prompts.items()
    )
    recorded = {record.method for record in report.records}
    names = [name for name in labels if name in recorded]
    best = wording.best_method(report)
    preset = best.name if best and best.name in recorded else names[0]
    choices = "".join(
        f'<label><input type="radio" name="method" value="{escaped(name)}"'
        f"{' checked' if name == preset else ''}><span>{escaped(labels[name])}</span>"
        "</label>"
        for name in names
    )
    return (
        '<form class="controls" autocomplete="off"><div>'
        '<label class="name" for="prompt">Prompt</label>'
        f'<select id="prompt" name="prompt">{options}</select></div>'
        f'<fieldset><legend>Method</legend><div class="choices">{choices}</div>'
        "</fieldset></form>"
    )


def _title(prompt: str) -> str:
    """Returns the last line of a prompt that says something, shortened."""
    lines = [line.strip() for line in prompt.splitlines() if line.strip()]
    line = wording.visible(lines[-1]) if lines else "(empty)"
    return line if len(line) <= 40 else line[:39] + "…"


def _article(record: DecodeRecord, label: str, *, hidden: bool) -> str:
    name = f"{escaped(label)}, prompt {record.prompt_index + 1}"
    steps = "".join(
        _step(number, step) for number, step in enumerate(record.steps, start=1)
    )
    return (
        f'<article class="decode card" data-prompt="{record.prompt_index}" '
        f'data-method="{escaped(record.method)}"{" hidden" if hidden else ""}>'
        f"<header><h3>{name}</h3><p><b>{len(record.output_ids)}</b> tokens in "
        f"<b>{record.serial_calls}</b> serial calls · block efficiency "
        f"<b>{record.block_efficiency:.2f}</b> · {wording.seconds(record.seconds)} s"
        '</p></header><div class="sides">'
        f'<ol class="steps" tabindex="0" aria-label="Serial calls of {name}">{steps}'
        f'</ol><pre class="text" tabindex="0" aria-label="Text of {name}">'
        f'<span class="given">{escaped(record.prompt)}</span>'
        f"{_output(record)}</pre></div></article>"
    )


def _step(number: int, step: Step) -> str:
    certain, *others = map(_piece, step.draft)
    tokens = [f'<ins class="certain">{certain}</ins>']
    tokens += [f"<ins>{piece}</ins>" for piece in others[: step.accepted - 1]]
    tokens += [f"<del>{piece}</del>" for piece in others[step.accepted - 1 :]]
    share = 100 * step.accepted / len(step.draft)
    rank = f"<em>draft {step.rank + 1}</em>" if step.rank else ""
    return (
        f'<li data-step="{number}"><span class="number">{number}</span>'
        f'<span class="draft">{"".join(tokens)}</span>'
        f'<span class="count"><b>{step.accepted}</b><small> of {len(step.draft)}'
        f'</small><span class="hidden-text"> accepted</span>'
        f'<i style="--share:{share:.4g}%"></i>{rank}</span></li>'
    )


def _piece(piece: str) -> str:
    """Returns a token as HTML, its white space as faint signs."""
    text = escaped(wording.visible(piece).replace(" ", "·")) or "∅"
    # The signs are set apart, so that underline and strike leave them readable; a
    # token of nothing else keeps its strike.
    return re.sub("[·⏎⇥]+", r"<i>\g<0></i>", text) if piece.strip() else text


def _output(record: DecodeRecord) -> str:
    """Returns the decoded text, split by serial call where the pieces give it."""
    parts = ["".join(step.draft[: step.accepted]) for step in record.steps]
    if "".join(parts) != record.text:
        return escaped(record.text)
    return "".join(
        f'<mark data-step="{number}">{escaped(part)}</mark>'
        for number, part in enumerate(parts, start=1)
    )
