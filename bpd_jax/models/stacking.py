"""Conversion between separate and stacked parameters of the layers of a trunk.

    attention_0/query/kernel [D,N,H], attention_1/query/kernel [D,N,H], …
    layers/attention/query/kernel [layers,D,N,H]

Stacked parameters are for a scan over the layers. Files and decoding use separate ones.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Params, PyTree
from bpd_jax.models.partitioning import LAYER

# The modules of a block, in the order of `transformer.Block`.
PARTS = (
    *("attention_norm", "attention", "attention_output_norm"),
    *("mlp_norm", "mlp", "mlp_output_norm"),
)
STACKED = "layers"


def is_stacked(trunk: Params) -> bool:
    """Whether its layers are stacked."""
    return STACKED in trunk


def stack_layers(trunk: Params, num_layers: int) -> Params:
    """Stacks the layers of a trunk, which may be in Linen's boxes, under `layers`."""
    layers = {
        part: _stack([trunk[f"{part}_{layer}"] for layer in range(num_layers)])
        for part in PARTS
        if f"{part}_0" in trunk
    }
    names = {f"{part}_{layer}" for part in PARTS for layer in range(num_layers)}
    rest = {name: value for name, value in trunk.items() if name not in names}
    return {**rest, STACKED: layers}


def unstack_layers(trunk: Params) -> Params:
    """The inverse of `stack_layers`, for arrays without boxes."""
    rest = {name: value for name, value in trunk.items() if name != STACKED}
    for part, stacked in trunk[STACKED].items():
        for layer in range(len(jax.tree.leaves(stacked)[0])):
            rest[f"{part}_{layer}"] = jax.tree.map(lambda x, i=layer: x[i], stacked)
    return rest


def _stack(layers: list[PyTree]) -> Any:
    def stack(*arrays: Any) -> Any:
        first = arrays[0]
        if not isinstance(first, nn.meta.AxisMetadata):
            return jnp.stack(arrays)
        stacked = first.replace(value=jnp.stack([box.value for box in arrays]))
        return stacked.add_axis(0, {nn.PARTITION_NAME: LAYER})

    return jax.tree.map(
        stack, *layers, is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata)
    )
