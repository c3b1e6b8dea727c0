"""The parameters of a blockwise model: initial ones, their shapes and numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Float, Params, PyTree
from bpd_jax.models.block_drafter import BlockDrafter
from bpd_jax.models.block_heads import is_trained
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.layers import PARTS, stack_layers
from bpd_jax.models.partitioning import unbox, with_shardings
from bpd_jax.models.transformer_config import ComputeConfig

_DEFAULT = ComputeConfig()


class _WithDrafter(BlockwiseLM):
    """Also has the parameters of a block drafter, for their initialization."""

    def setup(self) -> None:
        super().setup()
        if self.config.drafter is not None:
            assert isinstance(self.config.drafter, BlockDrafterConfig)
            self.drafter = BlockDrafter(self.config.drafter, self.config.trunk)

    def initialize_drafter(self, features: Float[Array, "B T F"]) -> None:
        if self.config.drafter is not None:
            self.drafter.initialize(features)


def init_boxed(
    config: BlockwiseConfig, rng: Array, compute: ComputeConfig = _DEFAULT
) -> PyTree:
    """Initial parameters, in Linen's boxes with logical axis names.

    The values do not depend on `compute`, which may stack them.
    """
    tokens = jnp.zeros((1, 1), jnp.int32)
    mask = jnp.ones((1, 1, 1), bool)
    method = _WithDrafter.all_logits
    model = _WithDrafter(config)
    params = model.init(rng, tokens, tokens, mask, method=method)["params"]
    if not compute.scan_layers:
        return params
    trunk = stack_layers(params["trunk"], config.trunk.num_layers)
    return {**params, "trunk": trunk}


def parameter_shapes(config: BlockwiseConfig) -> Params:
    """Shapes and dtypes of the parameters, without allocating them."""
    return unbox(_boxed_shapes(config, _DEFAULT))


def _boxed_shapes(config: BlockwiseConfig, compute: ComputeConfig) -> Params:
    trunk = config.trunk
    # All layers have the same shapes: one is traced, unless more are read by number.
    alike = not (compute.scan_layers or config.feature_layers or config.drafter)
    if alike:
        one = dataclasses.replace(
            trunk, num_layers=1, windowed_layers=None, unrotated_layers=()
        )
        config = dataclasses.replace(config, trunk=one)
    init = functools.partial(init_boxed, config, compute=compute)
    shapes = jax.eval_shape(init, jax.random.key(0))
    if alike:
        shapes["trunk"] |= {
            f"{part}_{layer}": shapes["trunk"][f"{part}_0"]
            for part in PARTS
            for layer in range(trunk.num_layers)
            if f"{part}_0" in shapes["trunk"]
        }
    # In the order of all trees, also of the names that were added.
    return jax.tree.map(lambda shape: shape, shapes)


def abstract_parameters(
    config: BlockwiseConfig, mesh: Mesh | None, compute: ComputeConfig = _DEFAULT
) -> Params:
    """Shapes, dtypes and shardings; without a mesh on the first device."""
    return with_shardings(_boxed_shapes(config, compute), mesh)


def count_parameters(config: BlockwiseConfig) -> dict[str, int]:
    """Number of parameters of each part: embedding, positions, blocks, heads, total.

    A draft vocabulary and its copied rows of the softmax are not counted.
    """
    counts = {"embedding": 0, "positions": 0, "blocks": 0, "heads": 0}
    if config.drafter is not None:
        counts["drafter"] = 0
    of_trunk = {"embedding": "embedding", "position_embedding": "positions"}
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameter_shapes(config)):
        module, name = path[0].key, path[1].key
        part = of_trunk.get(name, "blocks") if module == "trunk" else module
        if config.heads is None or part != "heads" or is_trained(config.heads, name):
            counts[part] += leaf.size
    return {**counts, "total": sum(counts.values())}
