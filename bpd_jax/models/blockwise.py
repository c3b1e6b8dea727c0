"""The blockwise language model: a trunk and L heads on its final hidden state.

Head 1 is the language model itself; head j predicts the token j steps ahead (paper
section 4, appendix C.2). All heads share the model's softmax, unless heads 2 … L have
their own softmax or vocabulary.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Int, Params, PyTree
from bpd_jax.models import products
from bpd_jax.models.attention import WholeTexts
from bpd_jax.models.block_drafter import BlockDrafter
from bpd_jax.models.block_heads import BlockHeads, apply_head, is_trained
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.layers import PARTS, stack_layers
from bpd_jax.models.partitioning import unbox, with_shardings
from bpd_jax.models.transformer import Transformer
from bpd_jax.models.transformer_config import ComputeConfig

_DEFAULT = ComputeConfig()


class BlockwiseLM(nn.Module):
    """A language model whose L heads predict the next L tokens from one hidden state.

    Attributes:
      compute: memory and speed options; with `scan_layers`, parameters are stacked.
      mesh: devices that rows and heads are sharded over, for flash attention.
    """

    config: BlockwiseConfig
    compute: ComputeConfig = _DEFAULT
    mesh: Mesh | None = None

    def setup(self) -> None:
        trunk, heads = self.config.trunk, self.config.heads
        self.trunk = Transformer(trunk, self.compute, self.mesh)
        if heads is not None and heads.num_ffns:
            self.heads = BlockHeads(heads, trunk, lambda: self.trunk.softmax_matrix)
        if self.config.drafter is not None:
            self.drafter = BlockDrafter(self.config.drafter, trunk)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"] | WholeTexts,
        cache: KVCache | None = None,
        earlier: KeyValues | None = None,
        layers: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B T D"], KeyValues, Float[Array, "B T F"]]:
        return self.trunk(tokens, positions, mask, cache, earlier, layers)

    def head_states(
        self,
        hidden: Float[Array, "... D"],
        embedded: Float[Array, "... D"] | None = None,
        features: Float[Array, "... F"] | None = None,
    ) -> Float[Array, "... L D"]:
        """The inputs of the softmax of every head; see `BlockHeads`."""
        heads = self.config.heads
        if heads is None or not heads.num_ffns:
            return hidden[..., None, :]
        return self.heads(hidden, embedded, features)

    def draft_logits(
        self, states: Float[Array, "... D"], level: int | Int[Array, ""] | None = None
    ) -> Float[Array, "... draft"]:
        """Logits of heads 2 … L over the draft vocabulary, float32.

        Args:
          level: j if all states belong to head j + 1; None if the second axis from the
            end runs over heads 2, 3, ….
        """
        heads = self.config.heads
        if heads is None or not heads.has_softmax:
            return self.trunk.logits(states)
        dtype = self.config.trunk.dtype
        if not heads.own_softmax:
            params = self.heads.variables["params"]
            return products.logits(params, self.heads.softmax, states, dtype)
        matrix = self.heads.softmax.astype(dtype)
        if level is None:
            matrix = matrix[: states.shape[-2]]
            logits = jnp.einsum("...LD,LVD->...LV", states, matrix)
        else:
            logits = jnp.einsum("...D,VD->...V", states, matrix[level - 1])
        return logits.astype(jnp.float32)

    def draft_tokens(self, indices: Int[Array, "..."]) -> Int[Array, "..."]:
        heads = self.config.heads
        if heads is None or heads.draft_vocabulary is None:
            return indices
        return self.heads.vocabulary[indices]

    def head_logits(
        self,
        hidden: Float[Array, "... D"],
        embedded: Float[Array, "... D"] | None = None,
        features: Float[Array, "... F"] | None = None,
    ) -> Float[Array, "... L V"]:
        """Logits of all heads, float32, for few positions at a time.

        For heads 2 … L, tokens outside the draft vocabulary have -inf.
        """
        states = self.head_states(hidden, embedded, features)
        first = self.trunk.logits(states[..., :1, :])
        if self.config.block_size == 1:
            return first
        rest = self.draft_logits(states[..., 1:, :])
        if rest.shape[-1] != first.shape[-1]:
            tokens = self.draft_tokens(jnp.arange(rest.shape[-1]))
            empty = jnp.full((*rest.shape[:-1], first.shape[-1]), -jnp.inf)
            rest = empty.at[..., tokens].set(rest)
        return jnp.concatenate([first, rest], axis=-2)

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Embeddings of tokens, without positions."""
        return self.trunk.embedding[tokens].astype(self.config.trunk.dtype)

    def next_token_logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Logits of head 1, the language model itself, float32."""
        heads = self.config.heads
        if heads is not None and heads.first_has_ffn:
            weights = {name: value[0] for name, value in self.heads.layers.items()}
            hidden = apply_head(heads, weights, hidden, dtype=self.config.trunk.dtype)
        return self.trunk.logits(hidden)

    def all_logits(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T T"],
    ) -> Float[Array, "B T L V"]:
        """Logits of all heads at all positions, for initialization and tests.

        Conditioned heads read y_0, the model's most probable next token.
        """
        heads, layers = self.config.heads, self.config.feature_layers
        hidden, _, features = self(tokens, positions, mask, layers=layers)
        if self.config.drafter is not None and self.is_initializing():
            self.drafter.initialize(features)
        if heads is None or not heads.is_conditioned:
            return self.head_logits(hidden)
        anchors = jnp.argmax(self.trunk.logits(hidden), axis=-1)
        return self.head_logits(hidden, self.embed(anchors), features)


def init_boxed(
    config: BlockwiseConfig, rng: Array, compute: ComputeConfig = _DEFAULT
) -> PyTree:
    """Initial parameters, in Linen's boxes with logical axis names.

    The values do not depend on `compute`, which may stack them.
    """
    tokens = jnp.zeros((1, 1), jnp.int32)
    mask = jnp.ones((1, 1, 1), bool)
    method = BlockwiseLM.all_logits
    model = BlockwiseLM(config)
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
