"""Settings: one dataclass field declares the type, default, help text and check.

Method names (`heads+ngram:alpha=0.5/best:16`), keyword arguments and help texts derive
from the same field:

    @dataclasses.dataclass(frozen=True)
    class Beam:
        drafts: int = setting(1, "number of drafts", integer(1, 1024))

`check_settings` validates the values of an instance, `parse_setting` reads one value
from text, `describe_settings` lists them for `--help`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from bpd_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Check:
    """The values that a setting accepts.

    Attributes:
      description: completes the sentence "NAME must be …".
      parse: reads a value from text; raises ValueError if it cannot.
      accepts: whether a value of the right type is allowed.
      optional: whether None is allowed, which leaves the choice to the caller.
    """

    description: str
    parse: Callable[[str], Any]
    accepts: Callable[[Any], bool]
    optional: bool = False

    def or_none(self) -> "Check":
        """The same check, for a setting whose default is chosen elsewhere."""
        return dataclasses.replace(self, optional=True)


def integer(least: int, most: int | None = None) -> Check:
    """Integers from `least` to `most`; without `most`, no upper bound."""
    bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
    high = math.inf if most is None else most
    return Check(
        f"an integer {bounds}",
        int,
        lambda value: type(value) is int and least <= value <= high,
    )


def number(least: float = -math.inf, below: float = math.inf) -> Check:
    """Finite numbers of at least `least` and below `below`."""
    bounds = [] if least == -math.inf else [f"of at least {least:g}"]
    bounds += [] if below == math.inf else [f"below {below:g}"]
    return Check(
        " ".join(["a finite number", " and ".join(bounds)]).strip(),
        float,
        lambda value: (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and math.isfinite(value)
            and least <= value < below
        ),
    )


def choice(*options: str) -> Check:
    """One of several words."""
    return Check(f"one of {', '.join(options)}", str, lambda value: value in options)


SWITCH = Check("0 or 1", int, lambda value: value in (0, 1))
"""A setting that is on (1) or off (0)."""


def setting(default: Any, help_: str, check: Check) -> Any:
    """Declares a field of a settings dataclass.

    Args:
      default: its value if it is not given.
      help_: one line, without a full stop.
      check: the values that are allowed.
    """
    return dataclasses.field(default=default, metadata={"help": help_, "check": check})


def fields_of(settings: Any) -> dict[str, dataclasses.Field]:
    """The declared settings of a dataclass or of an instance, in order."""
    return {
        field.name: field
        for field in dataclasses.fields(settings)
        if "check" in field.metadata
    }


def check_settings(settings: Any, name: str) -> None:
    """Validates every setting of an instance.

    Args:
      settings: the instance.
      name: of what it configures, for the message.

    Raises:
      UserError: a value is not allowed.
    """
    for field in fields_of(settings).values():
        check: Check = field.metadata["check"]
        value = getattr(settings, field.name)
        if value is None and check.optional:
            continue
        if not check.accepts(value):
            raise UserError(
                f"{name}: {field.name} must be {check.description}, not {value!r} "
                f"({field.metadata['help']})."
            )


def parse_setting(field: dataclasses.Field, text: str, name: str) -> Any:
    """Reads the value of one setting from text.

    Args:
      field: of the settings dataclass.
      text: the value as it was written.
      name: of what it configures, for the message.

    Raises:
      UserError: the text is not a value of that setting.
    """
    check: Check = field.metadata["check"]
    try:
        value = check.parse(text)
    except ValueError:
        value = None
    if value is None or not check.accepts(value):
        raise UserError(
            f"{name}: {field.name} must be {check.description}, not {text!r} "
            f"({field.metadata['help']})."
        )
    return value


def changed_settings(settings: Any) -> list[tuple[str, Any]]:
    """The settings whose values differ from their defaults, in order."""
    return [
        (name, getattr(settings, name))
        for name, field in fields_of(settings).items()
        if getattr(settings, name) != field.default
    ]
