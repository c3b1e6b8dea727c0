"""Definitions shared by all parts: named jobs and their sizes."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base import configuration
from bpd_jax.base.typing import Array, Params
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.drafting.assets import Assets, AttachedDrafter
from bpd_jax.models.block_drafter import with_softmax
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import parameter_shapes
from bpd_jax.ngrams.model import NGramModel

Row = dict[str, Any]
"""The result of one job."""

Job = tuple[str, Callable[[], Row]]
"""A name, and the function that measures, which may raise exceptions of jax."""

TINY = (
    "TransformerConfig.num_layers = 1",
    "TransformerConfig.d_model = 32",
    "TransformerConfig.d_ff = 64",
    "TransformerConfig.num_heads = 2",
    "BlockHeadsConfig.hidden = 16",
)
"""Bindings that reduce the model of a gin file for tests on a CPU."""

_TINY = (
    *TINY,
    "TransformerConfig.vocab_size = 64",
    "TransformerConfig.num_kv_heads = 1",
    "TransformerConfig.max_length = 160",
    "BlockHeadsConfig.num_heads = 3",
)


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """Sizes of the measurements.

    Attributes:
      tiny: whether to use sizes for tests, whose results are meaningless.
      rounds: repetitions of each measurement.
      batch_sizes: numbers of prompts that are decoded together.
      seconds: time that the part may take.
    """

    tiny: bool
    rounds: int
    batch_sizes: tuple[int, ...]
    seconds: float = 60.0

    @property
    def dtype(self) -> str:
        """The type of weights and activations: bfloat16 on accelerators."""
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"

    def model(self, file: str, heads: bool = True) -> BlockwiseConfig:
        """The model of a gin file, in `dtype`.

        Args:
          file: in gin_configs/models/.
          heads: whether to include block heads.
        """
        bindings = [
            f"TransformerConfig.dtype = '{self.dtype}'",
            f"TransformerConfig.param_dtype = '{self.dtype}'",
            *(_TINY if self.tiny else ()),
        ]
        config = configuration.parse(
            [f"gin_configs/models/{file}.gin"], bindings, BlockwiseConfig
        ).value
        return config if heads else dataclasses.replace(config, heads=None)


Part = Callable[[JobSettings], Iterator[Job]]
"""Yields jobs; arrays that it loads for a job are freed before the next one."""


def seconds_of(run: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each of `rounds` runs, after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return times


def random_decoder(config: BlockwiseConfig, ngram: NGramModel | None = None) -> Decoder:
    """A decoder on one device, with random weights and a random block drafter.

    Args:
      config: configuration of the model.
      ngram: n-gram model over its tokens.
    """
    model = Model(config, random_parameters(config))
    drafter = random_drafter(model) if config.block_size > 1 else None
    width = min(16, config.trunk.vocab_size)
    return Decoder(model, width=width, assets=Assets(ngram=ngram, drafter=drafter))


def random_parameters(config: BlockwiseConfig) -> Params:
    """Random parameters, by one small program for each shape.

    The initialization of all together takes XLA more than a minute to compile.
    """

    @functools.partial(jax.jit, static_argnames=("shape", "dtype"))
    def draw(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return 0.02 * jax.random.normal(key, shape, dtype)

    leaves, structure = jax.tree.flatten(parameter_shapes(config))
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))
    drawn = [draw(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def random_drafter(
    model: Model, features: tuple[int, ...] | None = None
) -> AttachedDrafter:
    """A block drafter of two layers of the model's width, with random weights.

    Args:
      model: the model, whose softmax it shares.
      features: layers whose states it reads; None for three of them.
    """
    config = drafter_config(model.config, features)
    functions = DrafterFunctions(config, model.config.trunk)
    trained = jax.jit(functions.init)(jax.random.key(1))
    softmax = softmax_rows(model.config, model.params, None)
    return AttachedDrafter.of(functions, with_softmax(trained, softmax, None))


def drafter_config(
    model: BlockwiseConfig, features: tuple[int, ...] | None = None
) -> BlockDrafterConfig:
    """The sizes of the drafter of `random_drafter`."""
    layers = model.trunk.num_layers
    features = features or tuple(sorted({layers // 4, layers // 2, layers - 1}))
    return BlockDrafterConfig(features, block_size=model.block_size)


def random_prompts(count: int, length: int, vocab_size: int) -> Sequence[np.ndarray]:
    """Prompts of random tokens, `[length]` int32 each."""
    draw = np.random.default_rng(0)
    return list(draw.integers(0, vocab_size, (count, length), np.int32))
