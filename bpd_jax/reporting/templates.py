"""Jinja2 templates of pages and pictures, which are files in this package.

Every value in a template is escaped, including control characters, unless it is markup.
"""

import functools
import importlib.resources
from typing import Any

import jinja2
from markupsafe import Markup

from bpd_jax.reporting.formatting import readable


def resource(name: str) -> str:
    """Returns the text of a file of this package."""
    folder = importlib.resources.files("bpd_jax.reporting")
    return (folder / name).read_text(encoding="utf-8")


@functools.cache
def environment() -> jinja2.Environment:
    """The environment that all templates share."""
    result = jinja2.Environment(
        loader=jinja2.FunctionLoader(resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_readable,
    )
    # A number without trailing zeros, and with fixed decimal places.
    result.filters["g"] = lambda value: f"{value:g}"
    result.filters["fixed"] = lambda value, places=2: f"{value:.{places}f}"
    return result


def rendered(name: str, **values: Any) -> Markup:
    """Returns a rendered template as markup, which other templates do not escape."""
    return Markup(environment().get_template(name).render(**values))


def _readable(value: object) -> object:
    if isinstance(value, str) and not isinstance(value, Markup):
        return readable(value)
    return value
