import functools
import itertools

import numpy as np
import pytest

from bpd_jax.base.errors import UserError

pytest.importorskip("pynini")
from bpd_jax.drafting.engines.fst import FstEngine
from tests.drafting.naive import ngram_model, random_lattice
from tests.ngrams.helpers import tables_of

END = 0


def best_with_free_backoff(model, history, tokens):
    """Best log-probability if every step may back off even where it need not.

    Follows histories through the arrays of the model: a history is kept down to what
    the model extends, and each step takes any suffix of it, paying its weights.
    """
    ngrams, backoffs = tables_of(model)
    histories = {gram[:-1] for gram in ngrams} | {(model.bos,)}

    def reduce(history):
        history = history[len(history) - min(len(history), model.order - 1) :]
        while history not in histories:
            history = history[1:]
        return history

    @functools.cache
    def best(history, remaining):
        if not remaining:
            return 0.0
        symbol = model.eos if remaining[0] == END else remaining[0]
        options = []
        paid, suffix = 0.0, history
        while True:
            gram = (*suffix, symbol)
            if gram in ngrams:
                ended = symbol == model.eos
                after = reduce((model.bos,) if ended else gram)
                options.append(paid + ngrams[gram] + best(after, remaining[1:]))
            if not suffix:
                return max(options)
            paid += backoffs[suffix]
            suffix = reduce(suffix[1:])

    symbols = tuple(model.bos if token == END else token for token in history)
    return best(reduce(symbols), tuple(tokens))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_best_drafts_equal_brute_force(order, alpha):
    model = ngram_model(order).with_unseen_tokens()
    lattice = random_lattice(order)
    context = np.array([[-1, END, 3], [2, 1, 1]], np.int32)
    rescorer = FstEngine(model, alpha)
    drafts = rescorer.refine(lattice, context, 5)
    for row in range(2):
        history = [t for t in context[row].tolist() if t >= 0]
        history.append(int(lattice.tokens[row, 0, 0]))
        want = []
        for choice in itertools.product(range(3), repeat=3):
            path = [int(lattice.tokens[row, i + 1, c]) for i, c in enumerate(choice)]
            heads = sum(lattice.log_probs[row, i + 1, c] for i, c in enumerate(choice))
            score = heads + alpha * best_with_free_backoff(model, history, path)
            want.append((score, path))
        want.sort(key=lambda pair: -pair[0])
        np.testing.assert_allclose(
            drafts.scores[row], [score for score, _ in want[:5]], atol=1e-3
        )
        assert (drafts.tokens[row, :, 0] == lattice.tokens[row, 0, 0]).all()
        assert len({tuple(d) for d in drafts.tokens[row].tolist()}) == 5
        scores = {tuple(path): score for score, path in want}
        for score, draft in zip(drafts.scores[row], drafts.tokens[row], strict=True):
            assert scores[tuple(draft[1:].tolist())] == pytest.approx(score, abs=1e-3)


def test_fewer_paths_than_drafts_leave_the_rest_unused():
    lattice = random_lattice(1, batch=1, length=2)
    drafts = FstEngine(ngram_model(2)).refine(lattice, np.array([[1]]), 5)
    assert np.isfinite(drafts.scores).tolist() == [[True] * 3 + [False] * 2]


def test_alpha_must_be_positive():
    with pytest.raises(UserError, match="alpha is 0"):
        FstEngine(ngram_model(2), alpha=0)
