"""Every model sums to one in every context."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting.counts import count_ngrams, with_min_counts
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.prune import prune

SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=30)


def sums_by_query(model):
    return [
        sums_after(model, model.ngrams(length) if length else np.zeros((1, 0), int))
        for length in range(model.order)
    ]


def sums_after(model, contexts):
    """Sums the probabilities of all events after each context, `[Q, C]`."""
    events = np.append(np.arange(model.vocab_size), model.eos)
    if model.end_of_text is not None:
        events = events[:-1]
    repeated = np.repeat(contexts, events.size, axis=0)
    scores = model.log_probs_of(repeated, np.tile(events, len(contexts)))
    return np.exp(scores).reshape(len(contexts), -1).sum(axis=1)


@given(
    SEQUENCES,
    SEQUENCES,
    st.integers(1, 5),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
    st.integers(0, 40),
    st.booleans(),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_probabilities_sum_to_one(
    sequences, other_sequences, order, minimums, limit, has_end
):
    end = 4 if has_end else None
    counts = count_ngrams(sequences, order=order, vocab_size=5, end_of_text=end)
    model = estimate_katz(with_min_counts(counts, [1, *minimums[: order - 1]]))
    other_model = estimate_katz(
        count_ngrams(other_sequences, order=3, vocab_size=5, end_of_text=end)
    ).with_unseen_tokens()
    models = [
        model,
        other_model,
        prune(model, model.sizes[0] + limit),
        prune(model, theta=0.01),
        prune(model, max_per_order=[limit, limit // 2, None, 1]),
        prune(model, model.sizes[0] + limit).with_unseen_tokens(),
    ]
    # Contexts that are not histories.
    unseen = np.array([[0] * order, [4] * order])
    for tested in models:
        tested.validate(1e-9)
        np.testing.assert_allclose(sums_after(tested, unseen), 1, atol=1e-9)
        for sums, expected in zip(
            tested.context_sums(), sums_by_query(tested), strict=True
        ):
            np.testing.assert_allclose(sums, expected, atol=1e-12)
            np.testing.assert_allclose(sums, 1, atol=1e-9)


def test_model_that_does_not_sum_to_one_is_refused(trigrams):
    weights = trigrams.log_backoffs[0].copy()
    index = int(np.flatnonzero(weights > -50)[3])
    weights[index] += 0.1
    trigrams.validate()
    changed = NGramModel(
        trigrams.vocab_size,
        trigrams.keys,
        trigrams.log_probs,
        (weights, *trigrams.log_backoffs[1:]),
    )
    with pytest.raises(UserError, match=rf"after the history \[{index}\] sum to 1\.0"):
        changed.validate()
