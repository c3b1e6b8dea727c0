"""The exception for input that a user can correct."""

from bpd_jax.base.errors import UserError

__all__ = ["UserError"]
