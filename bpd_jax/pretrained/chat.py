"""Conversations as text, by the Jinja template that comes with a model.

A template is a program that others wrote. It runs in Jinja's sandbox, which lets it
read the values that it is given, and change nothing. Powers are refused and the lengths
of ranges and repeated texts limited, so that a mistake in a short template does not run
for long. This does not protect from a template that is written to use up memory or
time: one that doubles a text again and again still does.
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

# Numbers in all ranges of one rendering, and the longest repeated text or list.
_MOST_STEPS = 1_000_000
_LONGEST_REPEAT = 1_000_000


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    **variables: Any,
) -> str:
    """Writes a conversation as the text that the model was trained on.

    The text holds special tokens under their names, the beginning of text included
    where the template writes it.

    Args:
      template: in Jinja, with the functions that the library transformers adds.
      messages: each with `role` (system, user, assistant) and `content`.
      add_generation_prompt: whether the text ends where an answer begins.
      bos_token: what the template writes to begin a text.
      eos_token: what it writes to end one.
      **variables: what else a template asks for, such as `enable_thinking`.

    Raises:
      UserError: the template is faulty, or refuses the messages.
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
                **variables,
            }
        )
    # What expressions in Python raise, a template can raise; SyntaxError is for loops
    # nested too deep.
    except (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"the chat template cannot be rendered: {reason}.") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, and leaves no trace."""

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
    # Writes as much filler text as it is asked for.
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


def _product(left: Any, right: Any) -> Any:
    for repeated, times in ((left, right), (right, left)):
        if (
            isinstance(repeated, str | list | tuple)
            and isinstance(times, int)
            and len(repeated) * times > _LONGEST_REPEAT
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
    """Jinja's own filter would escape `<` and `&`, as for a web page."""
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
    """`range`, with a limit to the numbers that all its calls give together."""
    left = _MOST_STEPS

    def limited(*arguments: int) -> range:
        nonlocal left
        numbers = range(*arguments)
        left -= len(numbers)
        if left < 0:
            raise jinja2.TemplateError("its loops are too long")
        return numbers

    return limited
