"""Rotary positions (Su et al. 2021) and the ways in which they are stretched.

A position p turns the pair of features (i, i + R/2) of every query and key by the angle
p · f_i, so that scores depend on distances alone. The pairs are those of the released
Llama weights, halves of a head, not neighbours.
"""

import dataclasses
import math
from typing import Annotated

import jax.numpy as jnp
import numpy as np

from bpd_jax.errors import UserError
from bpd_jax.settings import Count, Positive, Validated, choice, number
from bpd_jax.typing import Array, Float, Int

SCALINGS = ("none", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RotaryConfig(Validated):
    """Frequencies f_i = base^(-2i/R) of R turned features, perhaps stretched.

    Attributes:
      base: of the frequencies, often called theta.
      fraction: of each head's features that are turned; the rest stay.
      scaling: `none`; `linear` divides every frequency by `factor` (Chen et al. 2023);
        `llama3` does so for wavelengths above `original_length / low_factor`, not
        below `original_length / high_factor`, and blends between (Llama 3.1); `yarn`
        blends by the number of turns within `original_length` (Peng et al. 2023).
      factor: by which the context was stretched.
      original_length: of the context before stretching, in tokens.
      low_factor, high_factor: of llama3.
      beta_fast, beta_slow: of yarn: turns above which a frequency stays, and below
        which it is divided.
      truncate: of yarn: whether the blend begins and ends at whole pairs.
      attention_factor: of yarn: by which queries and keys grow; None is
        0.1 · ln(factor) + 1.
    """

    base: Annotated[float, number(above=1)] = 10000.0
    fraction: Annotated[float, number(above=0, most=1)] = 1.0
    scaling: Annotated[str, choice(*SCALINGS)] = "none"
    factor: Positive = 1.0
    original_length: Count | None = None
    low_factor: Positive = 1.0
    high_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def check_together(self) -> None:
        """Raises a `UserError` for bounds that contradict each other."""
        if not self.high_factor > self.low_factor:
            raise UserError("RotaryConfig.high_factor must be above low_factor.")
        if not self.beta_fast > self.beta_slow:
            raise UserError("RotaryConfig.beta_fast must be above beta_slow.")
        if self.scaling in ("llama3", "yarn") and self.original_length is None:
            raise UserError(
                f"RotaryConfig.original_length is missing for {self.scaling}: give the "
                "tokens of the context before stretching."
            )

    def turned(self, width: int) -> int:
        """R, how many of a head's `width` features are turned."""
        return int(width * self.fraction) // 2 * 2

    def frequencies(self, width: int) -> Float[np.ndarray, " R/2"]:
        """Radians per token for every pair, float64."""
        turned = self.turned(width)
        plain = self.base ** (-np.arange(0, turned, 2) / turned)
        if self.scaling == "none":
            return plain
        stretched = plain / self.factor
        if self.scaling == "linear":
            return stretched
        assert self.original_length is not None
        if self.scaling == "llama3":
            turns = self.original_length * plain / (2 * math.pi)
            kept = (turns - self.low_factor) / (self.high_factor - self.low_factor)
        else:
            low, high = (
                turned
                * math.log(self.original_length / (turns * 2 * math.pi))
                / (2 * math.log(self.base))
                for turns in (self.beta_fast, self.beta_slow)
            )
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, turned - 1)
            # A ramp over pairs: the fast ones, which come first, are kept.
            pairs = np.arange(turned // 2, dtype=np.float64)
            kept = 1 - (pairs - low) / ((high - low) or 0.001)
        kept = kept.clip(0, 1)
        return kept * plain + (1 - kept) * stretched

    @property
    def amplitude(self) -> float:
        """By which turned features grow."""
        if self.scaling != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], config: RotaryConfig
) -> Float[Array, "B T N H"]:
    """Turns every head's features by the angles of its position; float32 inside."""
    width = x.shape[-1]
    half = config.turned(width) // 2
    frequencies = jnp.asarray(config.frequencies(width), jnp.float32)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cosine, sine = (config.amplitude * f(angles) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cosine - second * sine, second * cosine + first * sine]
    turned = jnp.concatenate(parts, -1).astype(x.dtype)
    if 2 * half == width:
        return turned
    return jnp.concatenate([turned, x[..., 2 * half :]], -1)
