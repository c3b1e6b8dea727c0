"""A decoder with random parameters, block heads and a trigram model."""

import jax
import numpy as np

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.drafting.assets import Assets
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.model import Model
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz

VOCAB = 13


def random_model(heads, *, max_length=64, scale=0.3):
    """A random model of one layer."""
    config = BlockwiseConfig(
        TransformerConfig(VOCAB, 1, 16, 32, num_heads=2, max_length=max_length),
        BlockHeadsConfig(heads, hidden=8),
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(0, scale, leaf.shape).astype(leaf.dtype),
        parameter_shapes(config),
        is_leaf=lambda leaf: hasattr(leaf, "shape"),
    )
    return Model(config, params)


def random_decoder():
    """A decoder with four heads, and a trigram model of random texts."""
    model = random_model(4)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, VOCAB, 60).astype(np.int32) for _ in range(10)]
    counts = count_ngrams(texts, order=3, vocab_size=VOCAB, end_of_text=0)
    ngram = estimate_katz(counts)
    return Decoder(model, width=6, assets=Assets(ngram=ngram))
