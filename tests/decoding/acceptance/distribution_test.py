"""Speculative sampling follows the model: counts against exact probabilities.

20,000 texts of 3 tokens over a vocabulary of 8, against the probabilities of all 512
texts. The models are tables, so that nothing but the loop takes time.
"""

import dataclasses
import itertools
import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from bpd_jax.decoding.decode_loop import Weights, decode_on_device, prefill
from bpd_jax.decoding.options import SPECULATIVE, TYPICAL, StepOptions
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.searches.static import StaticTree, Topology
from bpd_jax.drafting.small_lm import SmallLM
from bpd_jax.drafting.sources.draft_model import DraftModelSource
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.candidates import top_candidates

VOCAB, PROMPT, BATCH = 8, 3, 20_000
TREE = Topology.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
CHAIN = Topology.of([(0,), (0, 0), (0, 0, 0)])


@flax.struct.dataclass
class TableModel:
    """Logits that depend on the last token alone; tables[0] is the model's own.

    Head j ≥ 2 reads `tables[j - 1]`.
    """

    tables: jax.Array | None = None
    block_size: int = flax.struct.field(pytree_node=False, default=4)

    mesh = None

    def with_params(self, tables):
        return self.replace(tables=tables)

    @property
    def config(self):
        return types.SimpleNamespace(trunk=types.SimpleNamespace(vocab_size=VOCAB))

    def empty_cache(self, batch, slots):
        return KVCache(
            keys=(jnp.zeros((batch, 1, 1, slots)),),
            values=(jnp.zeros((batch, 1, slots, 1)),),
            lengths=jnp.zeros(batch, jnp.int32),
        )

    def forward(self, tokens, positions, mask, cache=None, earlier=None, *, layers=()):
        hidden = tokens[..., None].astype(jnp.float32)
        kv = hidden[None, :, :, None]
        return hidden, KeyValues(kv, kv), jnp.zeros((*tokens.shape, 0))

    def next_token_logits(self, hidden):
        return self.tables[0][hidden[..., 0].astype(jnp.int32)]

    head_features = ()

    def block_candidates(self, hidden, block_size, width, *conditions):
        token = hidden[..., 0].astype(jnp.int32)
        logits = jnp.stack(
            [table[token] for table in self.tables[1:block_size]], axis=-2
        )
        return top_candidates(logits, width)


def tables(count=4, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(0, 1.2, (count, VOCAB, VOCAB)), jnp.float32)


def lattice_drafter(search):
    return PathDrafter(Paths(HeadsSource(4, 5)), search)


def draft_model_drafter(temperature):
    """A draft model close to the model, truncated to 6 tokens."""
    params = tables()[:1] + 0.8 * tables(1, seed=1)
    reader = SmallLM(TableModel(block_size=1), reach=4)
    source = DraftModelSource(4, 6, reader, params)
    return PathDrafter(Paths(source), StaticTree(TREE, temperature))


def count_texts(drafter, options, params=None):
    """How often each of the 512 texts was decoded, `[512]`."""
    model = TableModel(tables() if params is None else params)
    weights = Weights(drafter.arrays)
    ones = jnp.ones(BATCH, jnp.int32)
    state = prefill(
        model,
        weights,
        drafter,
        jnp.full((BATCH, 1), PROMPT),
        ones,
        4 * ones,
        (0, jnp.arange(BATCH)),
        options=options,
        max_calls=3,
    )
    state = decode_on_device(model, weights, drafter, state, options)
    texts = np.asarray(state.tokens)[:, 1:4]
    return np.bincount(texts @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3)


def exact_probabilities(options):
    """Of all 512 texts, by the definition of temperature, top-k and top-p."""
    table = np.asarray(tables()[0], np.float64) / options.temperature
    steps = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    for row in steps:
        order = np.argsort(-row)
        row[order[options.top_k or VOCAB :]] = 0
        row /= row.sum()
        before = np.cumsum(row[order]) - row[order]
        row[order[before >= options.top_p]] = 0
        row /= row.sum()
    probs = [
        steps[PROMPT, a] * steps[a, b] * steps[b, c]
        for a, b, c in itertools.product(range(VOCAB), repeat=3)
    ]
    return np.array(probs)


def p_value(counts, probs):
    """Of Pearson's chi-square; texts expected fewer than 5 times count as one."""
    expected = probs * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    expected, counts = expected[expected > 0], counts[expected > 0]
    return chi2.sf(((counts - expected) ** 2 / expected).sum(), len(expected) - 1)


DRAFTERS = {
    "drawn draft": lambda t: lattice_drafter(StaticTree(CHAIN, t)),
    "drawn tree": lambda t: lattice_drafter(StaticTree(TREE, t)),
    "best tree": lambda t: lattice_drafter(StaticTree(TREE)),
    "draft model": draft_model_drafter,
}


@pytest.mark.parametrize(
    "name, temperature",
    [
        ("drawn tree", 1.0),
        ("draft model", 1.0),
        pytest.param("drawn draft", 1.0, marks=pytest.mark.exhaustive),
        pytest.param("best tree", 1.0, marks=pytest.mark.exhaustive),
        *(pytest.param(n, 0.7, marks=pytest.mark.exhaustive) for n in DRAFTERS),
    ],
)
def test_texts_follow_the_distribution_of_the_model(name, temperature):
    options = StepOptions(temperature=temperature, acceptance=SPECULATIVE)
    counts = count_texts(DRAFTERS[name](temperature), options)
    assert counts.sum() == BATCH
    assert p_value(counts, exact_probabilities(options)) > 1e-4


def test_filtered_tokens_are_never_accepted():
    """Drafts are drawn from all candidates, whatever top-k and top-p leave."""
    options = StepOptions(temperature=1.0, acceptance=SPECULATIVE, top_k=5, top_p=0.8)
    drafter = lattice_drafter(StaticTree(TREE, 1.0))
    counts, probs = count_texts(drafter, options), exact_probabilities(options)
    assert (probs == 0).sum() > 300
    assert counts[probs == 0].sum() == 0
    assert p_value(counts, probs) > 1e-4


def test_a_source_too_peaked_for_float32_draws_without_bias():
    """Beside one candidate the probabilities of all others are less than 1e-40."""
    params = tables()
    best = params.max(-1, keepdims=True) == params
    peaked = params.at[1:].set(jnp.where(best, 100.0, params)[1:])
    options = StepOptions(temperature=1.0, acceptance=SPECULATIVE)
    drafter = lattice_drafter(StaticTree(TREE, 1.0))
    counts = count_texts(drafter, options, peaked)
    assert p_value(counts, exact_probabilities(options)) > 1e-4


@dataclasses.dataclass(frozen=True)
class WrongSource(PathDrafter):
    """Claims that its drafts were drawn uniformly from all candidates."""

    def propose(self, seen, arrays):
        tree = super().propose(seen, arrays)
        uniform = jnp.zeros_like(tree.sources.log_probs)
        sources = dataclasses.replace(tree.sources, log_probs=uniform)
        return dataclasses.replace(tree, sources=sources)


@pytest.mark.parametrize(
    "drafter, acceptance",
    [
        (WrongSource(Paths(HeadsSource(4, 5)), StaticTree(CHAIN, 1.0)), SPECULATIVE),
        (lattice_drafter(StaticTree(CHAIN)), TYPICAL),
    ],
    ids=["wrong source", "typical acceptance"],
)
def test_wrong_distributions_are_detected(drafter, acceptance):
    options = StepOptions(temperature=1.0, acceptance=acceptance)
    assert p_value(count_texts(drafter, options), exact_probabilities(options)) < 1e-9
