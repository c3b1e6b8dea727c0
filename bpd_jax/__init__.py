"""Blockwise parallel decoding with refined drafts, in JAX.

import bpd_jax

lm = bpd_jax.load("smollm2")
[answer] = bpd_jax.generate(lm, ["Why is the sky blue?"], method="ngram:16")
print(answer.text, answer.block_efficiency)
"""

from typing import Any

from bpd_jax.base import startup

if startup.is_program():
    startup.begin()

__version__ = "0.2.0"

_API = ("Completion", "LanguageModel", "generate", "load", "stream")
__all__ = ["__version__", *_API]


def __getattr__(name: str) -> Any:
    """Imports the Python interface, and thus jax, at the first use of its names."""
    if name in _API:
        from bpd_jax import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, including those that are not imported yet."""
    return sorted({*globals(), *_API})
