"""Blockwise parallel decoding with refined drafts, in JAX.

import bpd_jax

lm = bpd_jax.load("demo")
[answer] = bpd_jax.generate(lm, ["def main():"], method="ngram:16")
print(answer.text, answer.block_efficiency)
"""

from typing import Any

__version__ = "0.1.0"

_API = ("Completion", "LanguageModel", "generate", "load", "stream")
__all__ = ["__version__", *_API]


def __getattr__(name: str) -> Any:
    """Imports jax only when something is asked for."""
    if name in _API:
        from bpd_jax import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
