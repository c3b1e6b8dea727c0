"""The convolutions around the layers of a block drafter (DFlash2).

Before and after attention, and before and after the feed-forward layer, each position
of a block is mixed with the positions before it. A position's coefficients are those of
the drafter, one per feature, plus a linear function of its own state, one per group of
features. With z the normalised state, G its group, f attention or feed-forward layer,
and t the distance, up to `convolution_taps`:

    c(z_i) = K z_i                                        [2, taps, groups]
    u_i = Σ_t (base[0, t] + c(z_i)[0, t, G]) ∘ z_{i-t}    the input of f
    f(u)_i is replaced by Σ_t (base[1, t] + c(z_i)[1, t, G]) ∘ f(u)_{i-t}

Positions before the block count as 0.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float
from bpd_jax.models.layers import Projection
from bpd_jax.models.partitioning import EMBED, MLP
from bpd_jax.models.transformer import Block
from bpd_jax.models.transformer_config import TransformerConfig


def convolve(
    x: Float[Array, "... Q D"],
    base: Float[Array, "taps D"],
    dynamic: Float[Array, "... Q taps G"],
) -> Float[Array, "... Q D"]:
    """Mixes each position with those before it.

    >>> x, base = jnp.array([[1.0], [2.0], [4.0]]), jnp.array([[1.0], [10.0]])
    >>> convolve(x, base, jnp.zeros((3, 2, 1))).ravel().tolist()
    [1.0, 12.0, 24.0]
    """
    groups = dynamic.shape[-1]
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    total = jnp.zeros_like(grouped)
    for tap, kernel in enumerate(base.reshape(len(base), groups, -1)):
        pads = [(0, 0)] * (x.ndim - 2) + [(tap, 0), (0, 0), (0, 0)]
        shifted = jnp.pad(grouped, pads)[..., : x.shape[-2], :, :]
        total += (kernel.astype(x.dtype) + dynamic[..., tap, :, None]) * shifted
    return total.reshape(x.shape)


class Convolution(nn.Module):
    """The coefficients of the two convolutions around one layer.

    Attributes:
      taps: number of positions that are mixed.
      group: width of a group of features.
    """

    config: TransformerConfig
    taps: int
    group: int

    @nn.compact
    def __call__(
        self, z: Float[Array, "... D"]
    ) -> tuple[Float[Array, "2 taps D"], Float[Array, "... 2 taps G"]]:
        """The coefficients of the drafter, and those of each state."""
        width, taps = self.config.d_model, self.taps
        groups = width // self.group

        def identity(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
            return jnp.zeros(shape, dtype).at[:, 0].set(1)

        base = self.param("base", identity, (2, taps, width), self.config.param_dtype)
        dynamic = Projection(
            (width, 2 * taps * groups),
            (EMBED, MLP),
            (MLP,),
            self.config,
            gain=0.0,
            use_bias=False,
            name="dynamic",
        )(z)
        return base, dynamic.reshape(*z.shape[:-1], 2, taps, groups)


class ConvolvedBlock(Block):
    """A transformer block with convolutions around its layers.

    Attributes:
      attention_convolution, mlp_convolution: coefficients around the two layers.
      queries: Q, positions of one block.
    """

    attention_convolution: Convolution | None = None
    mlp_convolution: Convolution | None = None
    queries: int = 1

    def mixed(
        self, part: str, z: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Callable[[Array], Array]]:
        """The mixed input of a layer, and the function that mixes its output."""
        attention = part == "attention"
        convolution = self.attention_convolution if attention else self.mlp_convolution
        assert convolution is not None
        base, dynamic = convolution(z)

        def mix(side: int, x: Array) -> Array:
            blocks = x.reshape(len(x), -1, self.queries, x.shape[-1])
            own = dynamic[..., side, :, :]
            own = own.reshape(*blocks.shape[:3], *own.shape[-2:])
            return convolve(blocks, base[side], own).reshape(x.shape)

        return mix(0, z), functools.partial(mix, 1)
