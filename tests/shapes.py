"""Checks the shapes in annotations while tests run (`pytest --shapes`).

jaxtyping's import hook decorates all functions of the modules in `CHECKED` when they
are imported. Under `jax.jit` a function is checked once, when it is traced.
"""

import functools
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxtyping
import numpy as np
from beartype import beartype

CHECKED = (
    "bpd_jax.decoding",
    "bpd_jax.drafting",
    "bpd_jax.models",
    "bpd_jax.training.cross_entropy",
    "bpd_jax.training.drafter_blocks",
    "bpd_jax.training.levels_loss",
    "bpd_jax.training.loss",
    "bpd_jax.training.refiner_sources",
    "bpd_jax.training.refiners",
)


def install() -> None:
    """Must be called before the modules are imported."""
    jaxtyping.install_import_hook(CHECKED, f"{__name__}.checked")


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a check of its arguments that have shapes.

    jaxtyping passes results as further arguments. Lengths such as `L-1` are checked if
    `L` is an axis of an earlier argument. Fields of dataclasses are not checked when
    one is made: jax makes pytrees again with leaves that are no arrays.
    """
    if function.__name__ == "__init__":
        return function
    known: set[str] = set()
    hints = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        axes = set(_axes(hint))
        computed = {axis for axis in axes if re.search(r"\w[-+*/]", axis)}
        lengths = set(re.findall(r"[A-Za-z]\w*", " ".join(computed)))
        if axes and lengths <= known:
            hints[name] = _with_numpy(hint)
        if isinstance(hint, type):  # Others may be None.
            known |= {axis.lstrip("*#_?") for axis in axes - computed}
    if not hints:
        return function
    function.__annotations__ = hints
    return beartype(function)


def _with_numpy(hint: Any) -> Any:
    """The hint; a numpy array may stand for a jax array, as jax's functions allow."""
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        is_jax = hint.array_type is jax.Array
        return hint.dtype[jax.Array | np.ndarray, hint.dim_str] if is_jax else hint
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return functools.reduce(operator.or_, map(_with_numpy, parts))
    return origin[tuple(map(_with_numpy, parts))] if origin in (tuple, list) else hint


def _axes(hint: Any) -> Iterator[str]:
    """The axes of all arrays of a hint; "..." for an array without any."""
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        yield from hint.dim_str.split() or ["..."]
    for part in typing.get_args(hint):
        yield from _axes(part)
