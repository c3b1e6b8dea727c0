"""The settings that refiners share: their weight α and its slope."""

from bpd_jax.settings import number

# Trained refiners correct logits, and were trained with this weight.
TRAINED_ALPHA = 1.0

ALPHA = ("weight of its scores", number(0.0))
DEFAULT_ALPHA = ("weight of its scores; default --alpha", number(0.0).or_none())
SLOPE = ("how much alpha grows per nat of the head's entropy", number(-1e6, 1e6))
