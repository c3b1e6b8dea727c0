"""The draft model's paths are its own continuations."""

import jax
import numpy as np

from bpd_jax.drafting.interface import Prompts
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.searches.static import StaticTree, parallel_chains
from bpd_jax.drafting.small_lm import SmallLM
from bpd_jax.drafting.sources.draft_model import DraftModelSource

LENGTH, WIDTH = 4, 3


def draft_paths(small):
    functions, params = small
    source = DraftModelSource(LENGTH, WIDTH, SmallLM(functions, LENGTH), params)
    return Paths(source)


def test_every_search_grows_the_draft_models_continuations(
    make_model, make_view, slow_read, whole_text, check_every_search
):
    small = make_model(3)
    view = make_view(make_model(0))

    def offer(row, path):
        log_probs = slow_read(small, [*whole_text(view, row), *path])
        tokens = np.argsort(-log_probs)[:WIDTH]
        return tokens, log_probs[tokens]

    check_every_search(draft_paths(small), view, offer)


def test_chain_is_the_draft_models_greedy_continuation(
    make_model, make_view, slow_read, whole_text, grow_drafts
):
    small = make_model(3)
    view = make_view(make_model(0), seed=1)
    search = StaticTree(parallel_chains(1, LENGTH - 1))
    [tree] = grow_drafts(draft_paths(small), view, search)
    assert tree.num_chains == 1
    for row in range(3):
        text = whole_text(view, row)
        for _ in range(1, LENGTH):
            text.append(int(slow_read(small, text).argmax()))
        assert tree.tokens[row].tolist() == text[-LENGTH:]


def test_drawn_chain_follows_the_draft_models_distribution(make_model, make_view):
    """First draft tokens of 3,000 draws, and the probabilities in the tree."""
    small = make_model(3)
    count, temperature = 3000, 0.7
    view = make_view(make_model(0), lengths=(4,))
    paths = draft_paths(small)
    search = StaticTree(parallel_chains(1, LENGTH - 1), temperature)

    @jax.jit
    def draw(arrays, keys):
        memory = paths.remember(arrays, Prompts(view.tokens, view.lengths, None))
        state, _ = paths.start(view, arrays, memory)

        def draw_one(key):
            return search.grow(paths, arrays, state, view.next_token, key[None])

        return state.source.hidden, jax.vmap(draw_one)(keys)

    keys = jax.random.split(jax.random.key(1), count)
    hidden, trees = draw(paths.arrays, keys)
    logits = paths.source.small.logits(paths.arrays.source, hidden)[0, 0] / temperature
    best, tokens = jax.lax.top_k(logits, WIDTH)
    log_probs = jax.nn.log_softmax(best)
    np.testing.assert_array_equal(trees.sources.tokens[0, 0, 0], tokens)
    np.testing.assert_allclose(trees.sources.log_probs[0, 0, 0], log_probs, rtol=1e-4)
    probs = np.exp(log_probs)
    drawn = np.asarray(trees.tokens[:, 0, 1])
    for token, prob in zip(tokens.tolist(), probs, strict=True):
        deviation = np.sqrt(prob * (1 - prob) / count)
        assert abs((drawn == token).mean() - prob) < 4.5 * deviation


def test_parallel_chains_differ_in_their_first_token():
    assert parallel_chains(2, 3).choices == (
        (0,),
        (1,),
        (0, 0),
        (1, 0),
        (0, 0, 0),
        (1, 0, 0),
    )
