"""JSON values of a study as the types that are declared for them."""

import dataclasses
import functools
import types
import typing
from typing import Any

LARGEST = 1e15
"""Bound of all numbers: their sums, and thousandths of them, stay exact enough."""

_type_hints = functools.cache(typing.get_type_hints)


def typed(kind: Any, value: Any, name: str) -> Any:
    """Returns a JSON value as the type `kind`.

    >>> typed(dict[str, list[float]], {"a": [0.5, 1]}, "alphas")
    {'a': [0.5, 1]}

    Args:
      kind: a dataclass, whose fields must all be there; a `TypedDict`, where fields may
        be missing and others are kept; `list`, `dict`, a plain type, `X | None`, `Any`.
      value: the value.
      name: its name in errors.

    Raises:
      TypeError, ValueError: a field is missing, unknown, out of range, or of another
        type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:  # Only `X | None` occurs.
        return None if value is None else typed(arguments[0], value, name)
    is_record = dataclasses.is_dataclass(kind)
    keyed = is_record or typing.is_typeddict(kind)
    plain: Any = dict if keyed else origin or kind
    # Some writers write 1.0 as 1, and bool is a subclass of int.
    fitting: Any = (int, float) if plain is float else plain
    is_bool = isinstance(value, bool)
    if not isinstance(value, fitting) or (is_bool and plain is not bool):
        raise TypeError(f"{name} is not of the type {plain.__name__}")
    if plain in (int, float) and not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{name} is {value:.3g}")
    if origin is list:
        return [typed(arguments[0], item, name) for item in value]
    if origin is dict:
        return {
            key: typed(arguments[1], item, f"{name} of {key[:60]}")
            for key, item in value.items()
        }
    if not keyed:
        return value
    hints = _type_hints(kind)
    if not is_record:
        known = {
            key: typed(hints[key], value[key], key) for key in value if key in hints
        }
        return {**value, **known}
    if unknown := sorted(value.keys() - hints.keys()):
        raise ValueError(f"{name} has unknown fields: {', '.join(unknown)}")
    return kind(**{key: typed(hints[key], value[key], key) for key in value})
