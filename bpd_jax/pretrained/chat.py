"""Renders conversations as text with the Jinja template of a model.

A template is code. It runs in Jinja's immutable sandbox, which allows it to
read its variables and to change nothing, but does not limit its time and memory.
"""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from bpd_jax.base.errors import UserError


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Renders a conversation in the format that the model was trained on.

    Special tokens, which may include the begin-of-text token, are in the text by name.

    Args:
      template: Jinja template, which may use the functions that the library
        transformers adds.
      messages: messages, each with `role` (system, user, assistant) and `content`.
      add_generation_prompt: whether the text ends with the beginning of an answer.
      bos_token: name of the begin-of-text token.
      eos_token: name of the end-of-text token.
      variables: further variables of the template, such as `enable_thinking`.
    """
    try:
        return _compiled(template).render(
            {
                **(variables or {}),
                "messages": [dict(message) for message in messages],
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": bos_token,
                "eos_token": eos_token,
            }
        )
    # A template is code: besides Jinja's errors it raises any exception of Python's.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"the chat template cannot be rendered: {reason}.") from error


def template_variables(arguments: list[str]) -> dict[str, Any]:
    """The variables of `--template_arg=NAME=VALUE`: values are JSON, or else text.

    >>> template_variables(["enable_thinking=false", "date=1 May"])
    {'enable_thinking': False, 'date': '1 May'}
    """
    variables: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(
                f"--template_arg must be NAME=VALUE, such as enable_thinking=false, "
                f"not {argument!r}."
            )
        try:
            # As in Python, False and True are written with a capital letter, too.
            lowered = value.lower() if value in ("True", "False") else value
            variables[name] = json.loads(lowered)
        except ValueError:
            variables[name] = value
    return variables


# Text that no template changes, and blanks that a template may trim.
_MARK, _TRIMMED = "CONTINUED0MESSAGE", "\t \n\t"


def render_continued(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    messages: Sequence[Mapping[str, Any]],
) -> str:
    """Renders a conversation up to the end of its last content, to be continued.

    The content ends as the template writes it: with its blanks, unless the template
    trims them. Where it ends is found with other contents of the last message.
    """
    if not messages:
        raise UserError("there is no message to continue: the conversation is empty.")
    *before, last = messages
    content = last["content"]

    def rendered(text: str) -> tuple[str, int]:
        whole = render([*before, {**last, "content": text}])
        at = whole.rfind(_MARK)
        if at < 0:
            raise UserError(
                "the last message cannot be continued: the chat template does not "
                f"write the content of a message of {last['role']!r} at the end."
            )
        return whole, at

    probe, at = rendered(_TRIMMED + _MARK + _TRIMMED)
    keeps_left = probe[:at].endswith(_TRIMMED)
    keeps_right = probe.startswith(_TRIMMED, at + len(_MARK))
    shown = content if keeps_right else content.rstrip()
    shown = shown if keeps_left else shown.lstrip()
    text = probe[: at - len(_TRIMMED) * keeps_left] + shown
    if render(messages).startswith(text):
        return text
    # The template writes this content in another way.
    whole, at = rendered(content + _MARK)
    return whole[:at] if keeps_right else whole[:at].rstrip()


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}` around assistant messages, which has no effect."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(
        form
    )
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which escapes `<` and `&` for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)
