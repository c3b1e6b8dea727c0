"""Renders conversations as text with the Jinja template of a model.

A template is code. It runs in Jinja's immutable sandbox, which allows it to
read its variables and to change nothing. Powers are refused, and the lengths of ranges
and of repeated texts are limited, so that a mistake in a short template does not run
for long. This does not protect against a template that is designed to exhaust memory or
time, for example by doubling a text repeatedly.
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

from bpd_jax.errors import UserError

# Limits for the total length of all ranges of one rendering, and for a repeated text or
# list.
_MAX_RANGE_TOTAL = 1_000_000
_MAX_REPEAT = 1_000_000


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
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

    Raises:
      UserError: the template is invalid, or refuses the messages.
    """
    try:
        return _compiled(template).render(
            {
                "messages": [dict(message) for message in messages],
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": bos_token,
                "eos_token": eos_token,
                "range": _limited_range(),
            }
        )
    # A template is code: besides Jinja's errors it raises any exception of Python's.
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
    environment.intercepted_binops = frozenset({"*", "**"})
    environment.binop_table |= {"*": _product, "**": _power}
    environment.filters["tojson"] = _to_json
    # `lipsum` generates unlimited text.
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


def _product(left: Any, right: Any) -> Any:
    for repeated, times in ((left, right), (right, left)):
        if (
            isinstance(repeated, str | list | tuple)
            and isinstance(times, int)
            and len(repeated) * times > _MAX_REPEAT
        ):
            raise jinja2.TemplateError("it repeats a text or list too often")
    return left * right


def _power(left: Any, right: Any) -> Any:
    raise jinja2.TemplateError("it computes a power")


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


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _limited_range() -> Callable[..., range]:
    """`range` with a limit for the total length of the ranges of all calls."""
    remaining = _MAX_RANGE_TOTAL

    def limited(*arguments: int) -> range:
        nonlocal remaining
        numbers = range(*arguments)
        remaining -= len(numbers)
        if remaining < 0:
            raise jinja2.TemplateError("its loops are too long")
        return numbers

    return limited
