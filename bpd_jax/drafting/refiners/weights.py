"""The weight α of refiners, and the settings that define it."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.settings import number
from bpd_jax.base.typing import Array, Float, PyTree

# The weight of trained refiners in training.
TRAINED_ALPHA = 1.0

ALPHA = ("weight of its scores", number(0.0))
DEFAULT_ALPHA = ("weight of its scores; default --alpha", number(0.0).or_none())
SLOPE = ("increase of alpha per nat of the head's entropy", number(-1e6, 1e6))


@flax.struct.dataclass
class Weight:
    """The weight α of a refiner at each head.

    α_j = max(0, level + slope · H_j), where H_j is the entropy of head j + 1 in nats.
    With a positive slope the weight is larger where a head is uncertain, which the
    paper suggests as future work (appendix B.2). A slope of 0 is the paper's constant
    weight.
    """

    level: Float[Array, ""]
    slope: Float[Array, ""]

    @classmethod
    def of(cls, alpha: float, slope: float = 0.0) -> "Weight":
        """Converts the numbers to arrays."""
        return cls(*jax.device_put((np.float32(alpha), np.float32(slope))))

    def at(self, entropies: Float[Array, "B L"]) -> Float[Array, "B L-1"]:
        """α of heads 2 … L."""
        return jnp.maximum(self.level + self.slope * entropies[:, 1:], 0.0)


@flax.struct.dataclass
class WeightedParams:
    """The weight of a refiner's scores, and its parameters or table."""

    alpha: Weight
    params: PyTree
