"""Rotary position embeddings (Su et al. 2021) and their context extensions.

Position p rotates the pair of features (i, i + R/2) of every query and key by the angle
p · f_i, so that scores depend on relative positions. The pairs are those of the Llama
weights: the halves of a head, not adjacent features.
"""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import (
    Count,
    Positive,
    Validated,
    choice,
    configurable,
    each,
    number,
)
from bpd_jax.base.typing import Array, Float, Int

SCALINGS = ("none", "linear", "llama3", "yarn", "longrope")


@configurable
@dataclasses.dataclass(frozen=True)
class RotaryConfig(Validated):
    """Frequencies f_i = base^(-2i/R) of R rotated features, possibly scaled.

    Attributes:
      base: base of the frequencies, often called theta.
      fraction: fraction of the features of each head that are rotated.
      scaling: `none`; `linear` divides all frequencies by `factor` (Chen et al. 2023);
        `llama3` divides those with wavelengths above `original_length / low_factor`,
        keeps those below `original_length / high_factor`, and interpolates in between
        (Llama 3.1); `yarn` interpolates by the number of rotations within
        `original_length` (Peng et al. 2023); `longrope` divides each frequency by its
        own number (Ding et al. 2024).
      factor: extension factor of the context.
      original_length: length of the context before the extension, in tokens.
      low_factor, high_factor: thresholds of llama3.
      beta_fast, beta_slow: thresholds of yarn: numbers of rotations above which a
        frequency is kept, and below which it is divided.
      truncate: whether the thresholds of yarn are rounded to whole pairs.
      attention_factor: factor of queries and keys; None is 0.1 · ln(factor) + 1 for
        yarn, sqrt(1 + ln(factor) / ln(original_length)) for longrope.
      divisors: the numbers of longrope, one for each pair.
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
    divisors: Annotated[tuple[float, ...], each(number(above=0))] = ()

    def check_together(self) -> None:
        if not self.high_factor > self.low_factor:
            raise UserError("RotaryConfig.high_factor must be above low_factor.")
        if not self.beta_fast > self.beta_slow:
            raise UserError("RotaryConfig.beta_fast must be above beta_slow.")
        if (
            self.scaling in ("llama3", "yarn", "longrope")
            and self.original_length is None
        ):
            raise UserError(
                f"RotaryConfig.original_length is missing for {self.scaling}: give the "
                "length of the context before the extension."
            )

    def num_rotated(self, width: int) -> int:
        """R, number of rotated features of a head of `width` features."""
        return int(width * self.fraction) // 2 * 2

    def frequencies(self, width: int) -> Float[np.ndarray, " R/2"]:
        """Frequencies of all pairs in radians per token, float64."""
        rotated = self.num_rotated(width)
        plain = self.base ** (-np.arange(0, rotated, 2) / rotated)
        if self.scaling == "none":
            return plain
        if self.scaling == "longrope":
            if len(self.divisors) != len(plain):
                raise UserError(
                    f"RotaryConfig.divisors has {len(self.divisors)} numbers, but "
                    f"{len(plain)} pairs of features are rotated."
                )
            return plain / np.asarray(self.divisors)
        divided = plain / self.factor
        if self.scaling == "linear":
            return divided
        assert self.original_length is not None
        if self.scaling == "llama3":
            rotations = self.original_length * plain / (2 * math.pi)
            share = (rotations - self.low_factor) / (self.high_factor - self.low_factor)
        else:
            low, high = (
                rotated
                * math.log(self.original_length / (rotations * 2 * math.pi))
                / (2 * math.log(self.base))
                for rotations in (self.beta_fast, self.beta_slow)
            )
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, rotated - 1)
            # A ramp over pairs: the fastest ones, which come first, are kept.
            pairs = np.arange(rotated // 2, dtype=np.float64)
            share = 1 - (pairs - low) / ((high - low) or 0.001)
        share = share.clip(0, 1)
        return share * plain + (1 - share) * divided

    @property
    def amplitude(self) -> float:
        """Factor of the rotated features."""
        if self.scaling not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        growth = math.log(max(self.factor, 1.0))
        if self.scaling == "yarn":
            return 0.1 * growth + 1
        assert self.original_length is not None
        return math.sqrt(1 + growth / math.log(max(self.original_length, 2)))


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    config: RotaryConfig,
    *,
    rounded: bool = False,
) -> Float[Array, "B T N H"]:
    """Rotates the features of every head by its position, computed in float32.

    With `rounded`, products are rounded before they are added for every shape, not only
    for those where XLA does so.
    """
    width = x.shape[-1]
    half = config.num_rotated(width) // 2
    frequencies = jnp.asarray(config.frequencies(width), jnp.float32)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cosine, sine = (config.amplitude * f(angles) for f in (jnp.cos, jnp.sin))
    halves = x[..., : 2 * half].reshape(*x.shape[:-1], 2, half)
    # On a CPU, swapping the halves is several times as fast as concatenating results.
    # Both factors are stacked, because XLA would fuse a single cosine with the product
    # and compute it again for every layer and head.
    cosines = jnp.stack([cosine, cosine], axis=-2)
    sines = jnp.stack([-sine, sine], axis=-2)
    parts = halves * cosines, halves[..., ::-1, :] * sines
    if rounded:
        parts = jax.lax.optimization_barrier(parts)
    pairs = parts[0] + parts[1]
    rotated = pairs.reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    if 2 * half == width:
        return rotated
    return jnp.concatenate([rotated, x[..., 2 * half :]], -1)
