"""The programs to compile: jitted functions with the shapes of their arguments."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Count, Validated
from bpd_jax.base.typing import PyTree
from bpd_jax.data.rows import Batch
from bpd_jax.decoding.decode_loop import Weights, decode_on_device, prefill
from bpd_jax.decoding.options import DecodeConfig, StepOptions
from bpd_jax.decoding.sampling import row_keys
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.refiners.ngram import NGramRefiner, NGramRefinerArrays
from bpd_jax.drafting.refiners.weights import Weight
from bpd_jax.drafting.searches.best import ExactBest
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.models.blockwise import abstract_parameters
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.cache import KVCache
from bpd_jax.models.model import Model
from bpd_jax.models.model_flops import serial_call_flops, train_flops
from bpd_jax.models.partitioning import BATCH_SPEC, check_rows, heads_spec
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.search.device_table import DeviceTable
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.run_description import predictors
from bpd_jax.training.state import abstract_state
from bpd_jax.training.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile.

    Attributes:
      name: `train`, `decode`, …
      about: a short description of its sizes.
      mesh: mesh over the devices that run it.
      lower: traces the program; nothing is allocated.
      model_flops: FLOPs of one run on all devices; see `models.model_flops`.
      reads: bytes of parameters, moments of the optimizer and cache on one device.
    """

    name: str
    about: str
    mesh: Mesh
    lower: Callable[[], jax.stages.Lowered]
    model_flops: float
    reads: int


@dataclasses.dataclass(frozen=True)
class DecodeShapes(Validated):
    """Sizes of a decode step.

    Attributes:
      batch_size: rows over all devices.
      prompt_tokens: tokens of a prompt.
      max_new_tokens: maximum length of the answer.
      drafts: P, number of best drafts of the n-gram search.
      lattice_width: W, candidates of a head.
      num_ngrams: n-grams of the model on every device, of all orders.
      ngram_order: order of the n-gram model.
    """

    prefix = "--"

    batch_size: Count = 8
    prompt_tokens: Count = 512
    max_new_tokens: Count = 128
    drafts: Count = 16
    lattice_width: Count = DecodeConfig.lattice_width
    num_ngrams: Count = 100_000_000
    ngram_order: Count = 4


def train_program(config: TrainConfig, mesh: Mesh) -> Program:
    """One step of a training run, with donated state."""
    config.check_mesh(mesh)
    compute = config.compute
    optimizer = make_optimizer(config.optimizer, config.steps)
    abstract = abstract_state(config.model, optimizer, mesh, compute=compute)

    def lower() -> jax.stages.Lowered:
        step: Any = make_train_step(
            config.model,
            optimizer,
            abstract,
            mesh,
            compute=compute,
            settings=config.loss,
        )
        ids = np.zeros((config.batch_size, config.length), np.int32)
        batch = Batch(ids, ids, ids, ids.astype(bool))
        lambdas = np.zeros(config.model.num_losses, np.float32)
        return step.lower(
            abstract,
            spread(batch, mesh, BATCH_SPEC),
            spread(lambdas, mesh, PartitionSpec()),
        )

    return Program(
        name="train",
        about=(
            f"{config.batch_size} × {config.length} tokens, "
            f"{predictors(config.model)}, {_in_words(compute)}"
        ),
        mesh=mesh,
        lower=lower,
        model_flops=train_flops(
            config.model, config.batch_size, config.length, config.drawn_per_row
        ),
        reads=bytes_on_device(abstract),
    )


def decode_program(model: BlockwiseConfig, shapes: DecodeShapes, mesh: Mesh) -> Program:
    """The greedy decode loop with its n-gram search, `ngram_device:P`.

    The number of iterations is unknown, so FLOPs and bytes are those of one serial
    call, in the smallest of its passes.
    """
    check_rows("--batch_size", shapes.batch_size, mesh)
    limit, length = model.trunk.max_length, shapes.prompt_tokens + shapes.max_new_tokens
    if length > limit:
        raise UserError(
            f"--prompt_tokens={shapes.prompt_tokens} and --max_new_tokens="
            f"{shapes.max_new_tokens} are more than TransformerConfig.max_length = "
            f"{limit}."
        )
    if shapes.lattice_width > model.trunk.vocab_size:
        raise UserError(
            f"--lattice_width={shapes.lattice_width} is more than "
            f"TransformerConfig.vocab_size = {model.trunk.vocab_size}."
        )
    if model.block_size == 1:
        raise UserError(
            "the model has no block heads (BlockwiseConfig.heads), so there is no "
            "lattice for the n-gram search: compile --program=train alone."
        )
    refiner = NGramRefiner(
        ngram_shapes(model, shapes, mesh), max(shapes.ngram_order - 2, 0)
    )
    source = HeadsSource(model.block_size, shapes.lattice_width)
    drafter = PathDrafter(Paths(source, (refiner,)), ExactBest(shapes.drafts))
    options = StepOptions()
    bound = Model(model, abstract_parameters(model, mesh), mesh=mesh)
    weights = Weights(drafter.arrays)
    state = jax.eval_shape(
        functools.partial(
            prefill,
            drafter=drafter,
            options=options,
            max_calls=shapes.max_new_tokens,
        ),
        bound,
        weights,
        prompts=np.zeros((shapes.batch_size, shapes.prompt_tokens), np.int32),
        lengths=np.zeros(shapes.batch_size, np.int32),
        limits=np.zeros(shapes.batch_size, np.int32),
        keys=row_keys(0, jnp.arange(shapes.batch_size)),
    )
    in_heads = heads_spec(model.trunk.kv_heads, mesh)
    rows = spread(state, mesh, BATCH_SPEC)
    rows = dataclasses.replace(
        rows,
        history=spread(state.history, mesh, PartitionSpec(None, *BATCH_SPEC)),
        cache=KVCache(
            keys=spread(state.cache.keys, mesh, in_heads),
            values=spread(state.cache.values, mesh, in_heads),
            lengths=rows.cache.lengths,
        ),
    )

    return Program(
        name="decode",
        about=(
            f"{shapes.batch_size} rows of {length} tokens, {model.block_size} heads, "
            f"{shapes.drafts} drafts from {shapes.lattice_width} candidates a head, "
            f"{shapes.num_ngrams / 1e6:,.0f} million n-grams of order "
            f"{shapes.ngram_order}"
        ),
        mesh=mesh,
        lower=lambda: decode_on_device.lower(bound, weights, drafter, rows, options),
        model_flops=serial_call_flops(
            model, shapes.batch_size, min(drafter.pass_sizes), length
        ),
        reads=bytes_on_device((bound.params, rows.cache)),
    )


def ngram_shapes(
    model: BlockwiseConfig, shapes: DecodeShapes, mesh: Mesh
) -> NGramRefinerArrays:
    """The arrays of an n-gram model of a given size, replicated on every device.

    The n-grams are divided evenly among the orders from the second on. The search among
    the continuations of a context is as long as for the whole vocabulary.
    """
    vocab_size = model.trunk.vocab_size
    symbols = trie.symbol_width(vocab_size)
    remaining, orders = shapes.num_ngrams - symbols, shapes.ngram_order - 1
    if shapes.ngram_order < 2 or remaining < orders:
        raise UserError(
            f"--num_ngrams={shapes.num_ngrams} and --ngram_order={shapes.ngram_order}: "
            f"the order must be 2 or more, and the n-grams more than the {symbols:,} "
            "unigrams."
        )
    sizes = [symbols, *[remaining // orders] * orders]
    kind = np.uint16 if symbols <= np.iinfo(np.uint16).max else np.int32
    everywhere = NamedSharding(mesh, PartitionSpec())

    # Shapes instead of arrays: they are only traced.
    def arrays(sizes: list[int], dtype: Any) -> Any:
        shape = functools.partial(jax.ShapeDtypeStruct, sharding=everywhere)
        return tuple(shape((size,), dtype) for size in sizes)

    table = DeviceTable(
        log_probs=arrays(sizes, np.float32),
        log_backoffs=arrays(sizes[:-1], np.float32),
        first_child=arrays([size + 1 for size in sizes[:-1]], np.int32),
        symbols=arrays(sizes[1:], kind),
        steps=(vocab_size.bit_length(),) * orders,
        vocab_size=vocab_size,
        end_of_text=0,
    )
    number = spread(np.float32(0), mesh, PartitionSpec())
    return NGramRefinerArrays(table, Weight(number, number))


def spread(tree: PyTree, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Shapes and dtypes of arrays, with their sharding over a mesh."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def bytes_on_device(tree: PyTree) -> int:
    """Bytes of one device's share of arrays, given by shape, dtype and sharding."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def _in_words(compute: Any) -> str:
    """The settings that differ from their defaults, as text."""
    return ", ".join(
        f"{field.name} {getattr(compute, field.name)}"
        for field in dataclasses.fields(compute)
        if getattr(compute, field.name) != field.default
    )
