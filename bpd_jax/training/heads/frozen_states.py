"""States of the frozen model for texts, computed in batches."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding

from bpd_jax.base.compiled import padded_length
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Float, Int, Params
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.decoding_parameters import prepared
from bpd_jax.models.parameters import abstract_parameters
from bpd_jax.models.partitioning import BATCH_SPEC, row_parts
from bpd_jax.models.segment_attention import Segments
from bpd_jax.models.transformer_config import check_feature_layers


class FrozenModel:
    """A frozen model that computes the states of texts."""

    def __init__(
        self,
        model: BlockwiseConfig,
        params: Params,
        batch_tokens: int,
        dtype: str,
        layers: tuple[int, ...] = (),
        products: str = "float32",
        mesh: Mesh | None = None,
    ) -> None:
        """Prepares the model.

        Args:
          batch_tokens: tokens of a batch, padding included.
          layers: layers whose outputs are part of a state, after the final hidden
            state.
          products: precision of the model's products. bfloat16, with sums in float32,
            changes states by 1 to 3 % of their size.
        """
        check_feature_layers(layers, model.trunk.num_layers)
        self.d_model = model.trunk.d_model
        self.max_length = model.trunk.max_length
        self.dtype = states_dtype(dtype)
        self.layers = layers
        self._arguments = (model, params, batch_tokens)
        self.products, self._mesh = products, mesh
        trunk, config = params["trunk"], BlockwiseConfig(model.trunk)
        if mesh is not None:
            abstract = abstract_parameters(config, mesh)
            shardings = jax.tree.map(lambda x: x.sharding, abstract["trunk"])
            trunk = jax.device_put(trunk, shardings)
        self._params = {"trunk": trunk}
        if products == "bfloat16":
            config, self._params, _ = prepared(config, self._params, None, products)
        self._batch_tokens = batch_tokens
        module = BlockwiseLM(config, mesh=mesh)
        self._run = functools.partial(read_texts, module, jnp.dtype(dtype), layers)

    @property
    def width(self) -> int:
        """C, the width of a state: the final hidden state, then the layers in order."""
        return self.d_model * (1 + len(self.layers))

    def with_states(
        self, dtype: str, layers: tuple[int, ...], products: str
    ) -> "FrozenModel":
        """The same model with states of another kind; see `__init__`."""
        return FrozenModel(*self._arguments, dtype, layers, products, self._mesh)

    def states(
        self, texts: Sequence[np.ndarray]
    ) -> Iterator[tuple[int, Float[np.ndarray, "n C"]]]:
        """Yields the index of a text in `texts` and its states, longest texts first."""
        order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        while order:
            length = padded_length(len(texts[order[0]]))
            rows = self._rows(length)
            batch, order = order[:rows], order[rows:]
            tokens = np.zeros((rows, min(length, self.max_length)), np.int32)
            for row, index in enumerate(batch):
                text = texts[index]
                if len(text) > self.max_length:
                    raise UserError(
                        f"a text has {len(text)} tokens, which exceeds the model's "
                        f"max_length of {self.max_length}: generate shorter texts."
                    )
                tokens[row, : len(text)] = text
            placed: Any = tokens
            if self._mesh is not None:
                placed = jax.device_put(tokens, NamedSharding(self._mesh, BATCH_SPEC))
            states = np.asarray(self._run(self._params, placed))
            for row, index in enumerate(batch):
                text_states = states[row, : len(texts[index])]
                check_finite(text_states)
                yield index, text_states

    def _rows(self, length: int) -> int:
        """Texts of a batch, a multiple of the number of parts of the mesh."""
        rows, parts = max(1, self._batch_tokens // length), row_parts(self._mesh)
        return -(-rows // parts) * parts


def check_finite(states: np.ndarray) -> None:
    """Checks that no state exceeds the range of its dtype."""
    if not np.isfinite(states).all():
        raise UserError(
            f"the model's states exceed the range of {states.dtype.name}: store them "
            "in bfloat16 (states_dtype)."
        )


def states_dtype(name: str) -> np.dtype:
    """The numpy dtype of stored states."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def read_texts(
    module: BlockwiseLM,
    dtype: jnp.dtype,
    layers: tuple[int, ...],
    params: Params,
    tokens: Int[Array, "B T"],
) -> Float[Array, "B T C"]:
    """States of a batch of texts, in the precision in which they are stored."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, features = module.apply(
        {"params": params}, tokens, positions, Segments(), layers=layers
    )
    return jnp.concatenate([hidden, features], axis=-1).astype(dtype)
