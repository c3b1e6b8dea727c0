"""The loop against a reference implementation in plain Python, without a cache.

The reference enumerates all paths of the lattice, selects drafts by sorting, runs the
model on the whole text after every prefix of every draft, and accepts the longest draft
that agrees with the model.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import BATCHED, TREE, DecodeOptions
from bpd_jax.drafting.searches.static import expected_tree, typical_accuracies
from tests.decoding.random_models import make_model, make_prompts

BLOCK, WIDTH, NEW_TOKENS, END = 4, 3, 20, 0


class Reader:
    """Predictions of the model after a text, which is read from its beginning."""

    def __init__(self, model):
        @jax.jit
        def read(tokens, last):
            positions = jnp.arange(64)[None]
            mask = jnp.tril(jnp.ones((1, 64, 64), bool))
            hidden, *_ = model.forward(tokens[None], positions, mask)
            state = hidden[:, last]
            heads = model.block_candidates(state, BLOCK, WIDTH)
            return model.greedy_tokens(state)[0], *(x[0] for x in heads)

        @functools.cache
        def after(text):
            tokens = np.zeros(64, np.int32)
            tokens[: len(text)] = text
            return [np.asarray(x).tolist() for x in read(tokens, len(text) - 1)]

        self._after = after

    def next_token(self, text):
        return self._after(tuple(text))[0]

    def heads(self, text):
        """Candidates, log-probabilities and entropies of heads 2 … L."""
        return self._after(tuple(text))[1:]


def best_paths(reader, text, count):
    """The best of all paths, as drafts."""
    tokens, scores, _ = reader.heads(text)
    first = reader.next_token(text)
    paths = itertools.product(range(WIDTH), repeat=BLOCK - 1)
    total = {path: sum(scores[j][r] for j, r in enumerate(path)) for path in paths}
    best = sorted(total, key=total.get, reverse=True)[:count]
    return [[first, *(tokens[j][r] for j, r in enumerate(path))] for path in best]


def medusa_paths(reader, text, nodes):
    """The root and every node of Medusa's tree as a draft of its own."""
    tokens, _, _ = reader.heads(text)
    first = reader.next_token(text)
    topology = expected_tree(typical_accuracies(BLOCK), nodes)
    paths = [(), *(n for n in topology.choices if len(n) < BLOCK and max(n) < WIDTH)]
    return [[first, *(tokens[j][r] for j, r in enumerate(path))] for path in paths]


def prefixes(drafts):
    """All distinct prefixes, with the best rank of the drafts that begin with them."""
    ranks = {}
    for rank, draft in enumerate(drafts):
        for length in range(1, len(draft) + 1):
            ranks.setdefault(tuple(draft[:length]), rank)
    return ranks


def onward(prefix, ranks):
    """Extends a prefix by the best-ranked child until there is none."""
    while True:
        children = [p for p in ranks if len(p) == len(prefix) + 1 and p[:-1] == prefix]
        if not children:
            return list(prefix)
        prefix = min(children, key=ranks.get)


def twin(reader, propose, prompt):
    """Decodes one prompt; a list of what each serial call did."""
    text, calls = list(prompt), []
    while len(text) < len(prompt) + NEW_TOKENS and END not in text[len(prompt) :]:
        ranks = prefixes(propose(reader, text))
        entropies = [0.0, *reader.heads(text)[2]]
        right = [
            prefix
            for prefix in ranks
            if all(
                reader.next_token([*text, *prefix[:n]]) == prefix[n]
                for n in range(len(prefix))
            )
        ]
        longest = max(map(len, right))
        best = min((p for p in right if len(p) == longest), key=ranks.get)
        emitted = list(best)[: len(prompt) + NEW_TOKENS - len(text)]
        if END in emitted:
            emitted = emitted[: emitted.index(END) + 1]
        root = min((p for p in ranks if len(p) == 1), key=ranks.get)
        text += emitted
        ended = len(text) == len(prompt) + NEW_TOKENS or END in emitted
        draft = onward(best, ranks)
        calls.append(
            {
                "drafts": draft[: len(emitted)] if ended else draft,
                "accepted": len(emitted),
                "ranks": ranks[best],
                "proposed": onward(root, ranks),
                "nodes": len(ranks),
                "entropies": entropies,
            }
        )
    return text[len(prompt) :], calls


PROPOSALS = {
    "bpd": functools.partial(best_paths, count=1),
    "zero_gram:3": functools.partial(best_paths, count=3),
    "medusa:8": functools.partial(medusa_paths, nodes=8),
}


@pytest.fixture(scope="module")
def reader():
    return Reader(make_model(4, BLOCK))


@pytest.mark.parametrize(
    "name, verification",
    [
        *((name, TREE) for name in PROPOSALS),
        ("medusa:8", BATCHED),
        pytest.param("zero_gram:3", BATCHED, marks=pytest.mark.exhaustive),
    ],
)
def test_loop_equals_the_python_twin(reader, name, verification):
    prompts = make_prompts([5, 1, 12, 7], seed=1)
    options = DecodeOptions(
        max_new_tokens=NEW_TOKENS,
        end_of_text=END,
        batch_size=4,
        verification=verification,
    )
    decoder = Decoder(make_model(4, BLOCK), width=WIDTH)
    outputs = decoder.decode(parse_method(name), prompts, options)
    ranks = []
    for prompt, got in zip(prompts, outputs, strict=True):
        text, calls = twin(reader, PROPOSALS[name], prompt.tolist())
        assert got.output_ids.tolist() == text
        assert got.serial_calls == len(calls)
        for field in ("accepted", "ranks", "nodes"):
            want = [call[field] for call in calls]
            assert getattr(got, field).tolist() == want, field
        for field in ("drafts", "proposed"):
            want = [call[field] + [-1] * (BLOCK - len(call[field])) for call in calls]
            assert getattr(got, field).tolist() == want, field
        want = [call["entropies"] for call in calls]
        np.testing.assert_allclose(got.entropies, want, atol=1e-4)
        ranks += [call["ranks"] for call in calls]
    assert name == "bpd" or max(ranks) > 0
