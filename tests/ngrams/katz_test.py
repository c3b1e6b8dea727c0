"""Tests of bpd_jax.ngrams.katz."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.errors import UserError
from bpd_jax.ngrams.counting.counts import count_ngrams, with_min_counts
from bpd_jax.ngrams.katz import estimate_katz, good_turing_discounts
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.prune import prune


def sums_in_every_context(model: NGramModel) -> np.ndarray:
    """Sums P over all events, in every history of the model and some unseen ones."""
    if model.end_of_text is None:
        events = np.append(np.arange(model.vocab_size), model.eos)
    else:
        events = np.arange(model.vocab_size)
    longest = max(model.order - 1, 1)
    rows = [[-1] * longest, [0] * longest, [model.vocab_size - 1] * longest]
    for order in range(1, model.order):
        padding = [-1] * (longest - order)
        rows += [padding + row for row in model.ngrams(order).tolist()]
    contexts = np.repeat(np.array(rows), events.size, axis=0)
    scores = model.log_probs_of(contexts, np.tile(events, len(rows)))
    return np.exp(scores).reshape(len(rows), events.size).sum(axis=1)


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=30),
    st.integers(1, 5),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
    st.integers(0, 60),
    st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_model_sums_to_one_in_every_context(
    sequences: list[list[int]],
    order: int,
    minimums: list[int],
    extra: int,
    has_end: bool,
) -> None:
    counts = count_ngrams(
        sequences, order=order, vocab_size=5, end_of_text=4 if has_end else None
    )
    whole = estimate_katz(counts)
    frequent = estimate_katz(with_min_counts(counts, [1, *minimums[: order - 1]]))
    models = [whole, frequent]
    models += [prune(model, model.sizes[0] + extra) for model in (whole, frequent)]
    models += [models[2].with_unseen_tokens()]
    for model in models:
        np.testing.assert_allclose(sums_in_every_context(model), 1, atol=1e-9)


def test_discounts_of_a_sample_worked_by_hand() -> None:
    # n_1 ... n_3 = 8, 3, 1 and bins = 2: m = 3 * 1 / 8;
    # d_1 = (2 * 3 / 8 - m) / (1 - m) = 0.6; d_2 = (3 * 1 / 3 / 2 - m) / (1 - m) = 0.2.
    counts = np.repeat([1, 2, 3, 9], [8, 3, 1, 4])
    discounts = good_turing_discounts(counts, bins=2)
    np.testing.assert_allclose(discounts[1:], [0.6, 0.2, 0.999])


def test_discounts_without_singletons_use_the_lowest_count() -> None:
    # n_2 ... n_4 = 9, 3, 1 and bins = 3: m = 4 * 1 / (2 * 9) = 2/9;
    # d_2 = (3 * 3 / 9 / 2 - m) / (1 - m) = 5/14; d_3 = (4 / 3 / 3 - m) / (1 - m) = 2/7.
    counts = np.repeat([2, 3, 4], [9, 3, 1])
    discounts = good_turing_discounts(counts, bins=3)
    np.testing.assert_allclose(discounts[2:], [5 / 14, 2 / 7, 0.999])


@pytest.mark.parametrize("counts", [[1], [1, 1], [7, 9], [5, 5, 6], [1, 2, 2, 2]])
def test_degenerate_samples_leave_some_mass(counts: list[int]) -> None:
    discounts = good_turing_discounts(np.array(counts))[1:]
    assert ((discounts > 0) & (discounts < 1)).all()


@pytest.mark.parametrize("bins", [0, 10**12])
def test_bins_that_cannot_be_are_refused(bins: int) -> None:
    with pytest.raises(UserError, match=f"bins is {bins}: it must be from"):
        good_turing_discounts(np.array([1]), bins=bins)


def test_unigrams_are_relative_frequencies_without_bos() -> None:
    model = estimate_katz(count_ngrams([[0, 0, 1], [0]], order=1))
    assert np.exp(model.log_probs[0]).tolist() == pytest.approx(
        [3 / 6, 1 / 6, 2 / 6, 0]
    )


def test_a_complete_history_gives_its_rest_to_eos() -> None:
    # After 0 both 0 and </s>, the whole vocabulary, were seen.
    model = estimate_katz(count_ngrams([[0, 0]] * 3, order=2))
    assert model.log_backoffs[0][0] == -99
    probability = np.exp(model.log_prob([0], 0))
    assert probability < 0.5
    assert np.exp(model.log_prob([0], model.eos)) == pytest.approx(1 - probability)
