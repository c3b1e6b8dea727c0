"""Renders conversations as text with the Jinja template of a model.

A template is code. It runs in Jinja's immutable sandbox, which allows it to
read its variables and to change nothing, but does not limit its time and memory.
"""

import contextlib
import copy
import datetime
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
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
    special_texts: Mapping[str, str | list[str]] | None = None,
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
      special_texts: texts of further special tokens by their names.
      variables: further variables of the template, such as `enable_thinking`.
    """
    with _one_sentence():
        return _compiled(template).render(
            {
                "tools": None,
                "documents": None,
                **(special_texts or {}),
                **(variables or {}),
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "bos_token": bos_token,
                "eos_token": eos_token,
            }
        )


# Variables that come from the model and the conversation.
_RESERVED = {"messages", "add_generation_prompt", "bos_token", "eos_token"}


def check_variables(template: str, variables: Mapping[str, Any]) -> None:
    """Refuses variables that would have no effect or are not for users to set."""
    with _one_sentence():
        environment = _compiled(template).environment
        used = jinja2.meta.find_undeclared_variables(environment.parse(template))
    for name, value in variables.items():
        if name in _RESERVED or name in environment.globals:
            raise UserError(
                f"{name} is set by the conversation and the model: leave out this "
                "variable of the chat template."
            )
        if name not in used:
            known = ", ".join(sorted(used - _RESERVED)) or "none"
            raise UserError(
                f"the chat template has no variable {name!r}; it has {known}."
            )
        if name not in ("tools", "documents") or value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise UserError(
                f"{name} of the chat template must be a list of JSON objects, not "
                f"{value!r}."
            )


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


# Text that no template changes.
_MARK = "CONTINUED0MESSAGE"


def render_continued(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    messages: Sequence[Mapping[str, Any]],
) -> str:
    """Renders a conversation up to the end of its last content, to be continued.

    The content ends as the template writes it, with or without its blanks: the text
    that follows a marked content is cut from the conversation. Of a content of several
    parts the last text is continued.
    """
    if not messages:
        raise UserError("there is no message to continue: the conversation is empty.")
    *before, last = messages
    marked = copy.deepcopy(dict(last))
    parts, field = marked.get("content"), "text"
    if not isinstance(parts, list):
        parts, field = [marked], "content"
    texts = [p for p in parts if isinstance(p, dict) and isinstance(p.get(field), str)]
    if not texts:
        raise UserError("the last message cannot be continued: it has no text.")
    content = texts[-1][field]
    texts[-1][field] += _MARK
    start, mark, end = render([*before, marked]).rpartition(_MARK)
    if not mark:
        raise UserError(
            "the last message cannot be continued: the chat template does not write "
            f"the content of a message of {last.get('role')!r} at the end."
        )
    if not start.rstrip().endswith(content.strip()):
        raise UserError(
            "the last message cannot be continued: the chat template changes its "
            "content or leaves out a part of it."
        )
    whole = render(messages).removesuffix(end)
    # A template may write nothing at all for an empty content.
    return whole if whole.rstrip() == start.rstrip() else start


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """Turns errors of a template into one sentence.

    A template is code: besides Jinja's errors it raises any exception of Python's.
    """
    try:
        yield
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"the chat template cannot be rendered: {reason}.") from error


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
    # Jinja's own filter escapes `<` and `&` for HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda f: datetime.datetime.now().strftime(f)
    return environment.from_string(template)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)
