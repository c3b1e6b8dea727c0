"""Blockwise parallel decoding with refined drafts, in JAX."""

__version__ = "0.1.0"
