"""Lossless decoding: every method must produce the tokens of plain decoding.

The model is tiny and random and computes in float32 with products of the highest
precision, so that its logits are well apart; so are its drafters and refiners. Each
method decodes a batch of prompts of different lengths. Compiling takes most of the
time, so that several methods run at once.
"""

import concurrent.futures
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator_parts.jobs import Job, JobSettings, Row, random_drafter
from benchmarks.synthetic_ngrams import synthetic_model
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.assets import Assets, AttachedEagle
from bpd_jax.evaluation.efficiency import block_efficiency
from bpd_jax.models.attachment_files import LoadedRefiner
from bpd_jax.models.block_drafter import with_softmax
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.eagle import EagleConfig, EagleFunctions
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import parameter_shapes
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.trained_refiners import MarkovConfig
from bpd_jax.models.transformer_config import TransformerConfig

VOCABULARY, WIDTH, HEADS = 13, 16, 4
METHODS = (
    "bpd",
    "zero_gram:4",
    "ngram:3",
    "ngram_device:3:adaptive=1",
    "medusa:8",
    "medusa_ngram:6:search=static",
    "neural:2",
    "neural:2:mode=parallel",
    "prompt_lookup:4",
    "lookahead:3:order=3",
    "draft_model:3",
    "markov:2",
    "heads+ngram/chains:2",
    "heads+ngram/cover:3",
    "heads+ngram/beam:2+lookup:3",
    "block/greedy",
    "block+ngram/tree:8+lookup:4",
    "eagle:3/tree:8",
    "oracle",
)
_TINY = ("block+ngram/tree:8+lookup:4",)


def jobs(settings: JobSettings) -> Iterator[Job]:
    """One job for each method; its seconds are those of waiting for its texts."""
    methods = _TINY if settings.tiny else METHODS
    texts = functools.cache(lambda: _decode_all(("greedy", *methods)))
    for method in methods:
        yield (
            method,
            lambda method=method: _compared(
                texts()[method].result(), texts()["greedy"].result()
            ),
        )


def _decode_all(names: Sequence[str]) -> dict[str, concurrent.futures.Future[Any]]:
    """The texts of each method, as soon as they are decoded."""
    decoder = _decoder()
    pool = concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2))
    return {name: pool.submit(_decode, decoder, name) for name in names}


def _compared(texts: Sequence[Generation], plain: Sequence[Generation]) -> Row:
    pairs = zip(texts, plain, strict=True)
    wrong = sum(not np.array_equal(a.output_ids, b.output_ids) for a, b in pairs)
    return {
        "texts": len(texts),
        "texts_that_differ": wrong,
        "tokens_per_call": block_efficiency(texts),
        "passed": not wrong,
    }


def _decode(decoder: Decoder, name: str) -> list[Generation]:
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, VOCABULARY, n, np.int32) for n in (3, 17, 9)]
    options = DecodeOptions(max_new_tokens=24, batch_size=len(prompts))
    method = GREEDY if name == "greedy" else parse_method(name)
    reference = None
    with jax.default_matmul_precision("highest"):
        if method.is_oracle:
            reference = decoder.decode(GREEDY, prompts, options)
        return decoder.decode(method, prompts, options, reference=reference)


def _decoder() -> Decoder:
    """A random model with all assets."""
    model, small = _model(0, HEADS), _model(1, 1)
    assets = Assets(
        ngram=synthetic_model(300, VOCABULARY),
        rescorer=small,
        draft_model=small,
        drafter=random_drafter(model, (0,)),
        eagle=_eagle(model),
        markov=_refiner(),
    )
    return Decoder(model, width=4, assets=assets)


def _model(seed: int, heads: int) -> Model:
    trunk = TransformerConfig(VOCABULARY, 2, WIDTH, 32, num_heads=2, max_length=160)
    blocks = BlockHeadsConfig(heads, hidden=8) if heads > 1 else None
    config = BlockwiseConfig(trunk, blocks)
    return Model(config, _random(parameter_shapes(config), seed))


def _eagle(model: Model) -> AttachedEagle:
    layer = TransformerConfig(
        VOCABULARY, 1, WIDTH, 32, num_heads=2, use_bias=False, rotary=RotaryConfig()
    )
    functions = EagleFunctions(EagleConfig(layer, feature_layers=(0,)))
    trained = _random(jax.eval_shape(functions.init, jax.random.key(0)), 3)
    embedding = model.params["trunk"]["embedding"]
    params = {**with_softmax(trained, embedding, None), "embedding": embedding}
    return AttachedEagle(functions, params)


def _refiner() -> LoadedRefiner:
    config = MarkovConfig(VOCABULARY, WIDTH, HEADS)
    shapes = jax.eval_shape(lambda: config.init(jax.random.key(0)))
    return LoadedRefiner(config, _random(shapes, 2), {})


def _random(shapes: Any, seed: int) -> Any:
    """Parameters large enough for logits that are well apart."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(0, 0.3, leaf.shape), leaf.dtype), shapes
    )
