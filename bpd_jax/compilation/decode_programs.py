"""The programs that decode: the pass over the prompts, and the loop of a method."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Count, Validated
from bpd_jax.base.typing import Params
from bpd_jax.compilation.programs import Program, bytes_on_device, spread
from bpd_jax.decoding import decode_state
from bpd_jax.decoding.decode_loop import (
    Weights,
    decode_on_device,
    prefill,
    run_prompts,
)
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeConfig, StepOptions
from bpd_jax.drafting.assets import Assets
from bpd_jax.drafting.interface import Drafter, without_arrays
from bpd_jax.drafting.parts import BuildContext
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.decoding_parameters import stacked_layers
from bpd_jax.models.layers import is_stacked
from bpd_jax.models.model import Model
from bpd_jax.models.model_flops import forward_flops, serial_call_flops
from bpd_jax.models.parameters import abstract_parameters
from bpd_jax.models.partitioning import BATCH_SPEC, check_rows
from bpd_jax.models.transformer_config import ComputeConfig
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.search.device_table import DeviceTable


@dataclasses.dataclass(frozen=True)
class DecodeShapes(Validated):
    """Sizes of a decode step.

    Attributes:
      batch_size: rows over all devices.
      prompt_tokens: tokens of a prompt.
      max_new_tokens: maximum length of the answer.
      method: the method, which must draft on the device and need no other assets than
        an n-gram model and a rescorer.
      lattice_width: W, candidates of a head.
      num_ngrams: n-grams of the model on every device, of all orders.
      ngram_order: order of the n-gram model.
    """

    prefix = "--"

    batch_size: Count = 8
    prompt_tokens: Count = 512
    max_new_tokens: Count = 128
    method: str = "ngram_device:16"
    lattice_width: Count = DecodeConfig.lattice_width
    num_ngrams: Count = 100_000_000
    ngram_order: Count = 4

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return self.prompt_tokens + self.max_new_tokens


def decode_programs(
    config: BlockwiseConfig,
    shapes: DecodeShapes,
    mesh: Mesh,
    rescorer: BlockwiseConfig | None = None,
) -> list[Program]:
    """The pass over the prompts, and the greedy loop that decodes after it.

    The number of iterations is unknown, so the loop's FLOPs and bytes are those of one
    serial call, in the smallest of its passes. `rescorer` is the small LM of neural
    methods.
    """
    check_rows("--batch_size", shapes.batch_size, mesh)
    if shapes.length > config.trunk.max_length:
        raise UserError(
            f"--prompt_tokens={shapes.prompt_tokens} and --max_new_tokens="
            f"{shapes.max_new_tokens} are more than TransformerConfig.max_length = "
            f"{config.trunk.max_length}."
        )
    model = Model(config, abstract_model(config, mesh), mesh=mesh)
    drafter = abstract_drafter(model, shapes, mesh, rescorer)
    weights = Weights(spread(drafter.arrays, mesh, PartitionSpec()))
    rows = np.zeros(shapes.batch_size, np.int32)
    prompts = np.zeros((shapes.batch_size, shapes.prompt_tokens), np.int32)
    options = StepOptions()
    state = jax.eval_shape(
        functools.partial(
            prefill, drafter=drafter, options=options, max_calls=shapes.max_new_tokens
        ),
        model,
        weights,
        prompts=prompts,
        lengths=rows,
        limits=rows,
        keys=(0, rows),
    )
    placed = jax.tree.map(
        lambda x, spec: spread(x, mesh, spec), state, decode_state.specs(state, mesh)
    )
    prompts = spread(prompts, mesh, BATCH_SPEC)
    max_calls = spread(np.int32(0), mesh, PartitionSpec())
    return [
        Program(
            name="prefill",
            about=f"{shapes.batch_size} prompts of {shapes.prompt_tokens} tokens",
            mesh=mesh,
            lower=lambda: run_prompts.lower(
                model, drafter.feature_layers, prompts, None
            ),
            model_flops=forward_flops(config, shapes.batch_size, shapes.prompt_tokens),
            reads=bytes_on_device(model.params),
        ),
        Program(
            name="decode",
            about=(
                f"{shapes.method}, {shapes.batch_size} rows of {shapes.length} tokens, "
                f"{config.block_size} heads"
            ),
            mesh=mesh,
            lower=lambda: decode_on_device.lower(
                model, weights, without_arrays(drafter), placed, options, max_calls
            ),
            model_flops=serial_call_flops(
                config, shapes.batch_size, min(drafter.pass_sizes), shapes.length
            ),
            reads=bytes_on_device((model.params, placed.cache)),
        ),
    ]


def abstract_model(config: BlockwiseConfig, mesh: Mesh) -> Params:
    """The shapes and shardings of parameters that are prepared for decoding."""
    params = abstract_parameters(config, mesh)
    stacked = jax.eval_shape(
        lambda trunk: stacked_layers(trunk, config.trunk, mesh),
        jax.tree.map(lambda x: x.update(sharding=None), params["trunk"]),
    )
    if mesh.size == 1:
        return {**params, "trunk": spread(stacked, mesh, PartitionSpec())}
    compute = ComputeConfig(scan_layers=is_stacked(stacked))
    return abstract_parameters(config, mesh, compute)


def abstract_drafter(
    model: Model,
    shapes: DecodeShapes,
    mesh: Mesh,
    rescorer: BlockwiseConfig | None = None,
) -> Drafter:
    """The drafter of a method, whose arrays are shapes, replicated on every device."""
    everywhere = PartitionSpec()
    small = None
    if rescorer is not None:
        params = spread(abstract_parameters(rescorer, mesh), mesh, everywhere)
        small = Model(rescorer, params)
    vocab_size = model.config.trunk.vocab_size
    ngram: Any = _NGramSizes(shapes.ngram_order, vocab_size, shapes.method)
    context = BuildContext(
        model,
        Assets(ngram=ngram, rescorer=small),
        width=shapes.lattice_width,
        alpha=DecodeConfig.alpha,
        method=shapes.method,
    )
    method = parse_method(shapes.method)
    if "ngram" in method.needs:
        context.shared["ngram table"] = ngram_table(model.config, shapes, mesh)
    return method.build(context)


@dataclasses.dataclass(frozen=True)
class _NGramSizes:
    """What a refiner on the device reads of an n-gram model besides its table."""

    order: int
    vocab_size: int
    method: str

    def __getattr__(self, name: str) -> Any:
        """Engines on the host read the model itself, which there is none of."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise UserError(
            f"--method={self.method} drafts on the host: give one that drafts on the "
            "device, such as ngram_device:16."
        )


def ngram_table(
    model: BlockwiseConfig, shapes: DecodeShapes, mesh: Mesh
) -> DeviceTable:
    """The shapes of an n-gram model of a given size, replicated on every device.

    The n-grams are divided evenly among the orders from the second on.
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
    return spread(DeviceTable.of_sizes(sizes, vocab_size), mesh, PartitionSpec())
