"""A small model with random parameters and a trigram model, bound in a decoder."""

import jax
import numpy as np
import pytest

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.methods import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.assets import Assets
from bpd_jax.evaluation.compare import compare
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz

VOCAB = 13


@pytest.fixture(scope="session")
def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in (5, 9, 3)]


@pytest.fixture(scope="session")
def decoder():
    config = BlockwiseConfig(
        TransformerConfig(VOCAB, 1, 16, 32, num_heads=2, max_length=64),
        BlockHeadsConfig(4, hidden=8),
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype),
        parameter_shapes(config),
        is_leaf=lambda leaf: hasattr(leaf, "shape"),
    )
    texts = [rng.integers(0, VOCAB, 60).astype(np.int32) for _ in range(10)]
    counts = count_ngrams(texts, order=3, vocab_size=VOCAB, end_of_text=0)
    return Decoder(
        ModelFunctions(config),
        params,
        width=6,
        assets=Assets(ngram=estimate_katz(counts)),
    )


@pytest.fixture(scope="session")
def make_generation():
    """Makes a decoded text; by default one of plain decoding."""

    def make(output=(), calls=1, **fields):
        plain = {
            "input_ids": np.array([1, 2]),
            "output_ids": np.array(output, int),
            "serial_calls": calls,
            "seconds": 0.5,
            "drafts": np.zeros((calls, 1), int),
            "accepted": np.ones(calls, int),
            "ranks": np.zeros(calls, int),
            "proposed": np.zeros((calls, 1), int),
            "nodes": np.ones(calls, int),
            "entropies": np.full((calls, 1), np.nan),
        }
        return Generation(**{**plain, **fields})

    return make


@pytest.fixture(scope="session")
def results(decoder, prompts):
    """Every kind of method on the prompts, by name."""
    pytest.importorskip("pynini")
    methods = [parse_method(n) for n in ("bpd", "zero_gram:3", "ngram:3", "oracle")]
    found = compare(
        decoder, methods, prompts, DecodeOptions(max_new_tokens=16, batch_size=3)
    )
    return {result.method.name: result for result in found}
