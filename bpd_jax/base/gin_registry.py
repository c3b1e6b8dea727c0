"""Registers dataclasses with gin where they are defined.

Hosts without gin decode and train through the Python interface; gin files need gin.
"""

from collections.abc import Callable
from typing import Any, TypeVar

try:
    import gin
except ImportError:
    gin = None

T = TypeVar("T", bound=Callable[..., Any])

registered: dict[str, Callable[..., Any]] = {}
"""What `configurable` has registered, by name."""


def configurable(target: T) -> T:
    """Lets gin files set the arguments of a class or function, which stays as it is."""
    registered[target.__name__] = target
    if gin is not None:
        gin.register(target, module="bpd_jax")
    return target
