import dataclasses

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting.counts import NGramCounts, count_ngrams
from bpd_jax.ngrams.katz import estimate_katz, good_turing_discounts


def test_discounts_of_a_sample_computed_by_hand():
    # n_1 ... n_3 = 8, 3, 1 and bins = 2: m = 3 * 1 / 8;
    # d_1 = (2 * 3 / 8 - m) / (1 - m) = 0.6; d_2 = (3 * 1 / 3 / 2 - m) / (1 - m) = 0.2.
    counts = np.repeat([1, 2, 3, 9], [8, 3, 1, 4])
    discounts = good_turing_discounts(counts, bins=2)
    np.testing.assert_allclose(discounts[1:], [0.6, 0.2, 0.999])


def test_discounts_without_singletons_use_the_lowest_count():
    # n_2 ... n_4 = 9, 3, 1 and bins = 3: m = 4 * 1 / (2 * 9) = 2/9;
    # d_2 = (3 * 3 / 9 / 2 - m) / (1 - m) = 5/14; d_3 = (4 / 3 / 3 - m) / (1 - m) = 2/7.
    counts = np.repeat([2, 3, 4], [9, 3, 1])
    discounts = good_turing_discounts(counts, bins=3)
    np.testing.assert_allclose(discounts[2:], [5 / 14, 2 / 7, 0.999])


@pytest.mark.parametrize("counts", [[1], [1, 1], [7, 9], [5, 5, 6], [1, 2, 2, 2]])
def test_degenerate_samples_leave_some_mass(counts):
    discounts = good_turing_discounts(np.array(counts))[1:]
    assert ((discounts > 0) & (discounts < 1)).all()


def test_unigrams_are_relative_frequencies_without_bos():
    model = estimate_katz(count_ngrams([[0, 0, 1], [0]], order=1))
    assert np.exp(model.log_probs[0]).tolist() == pytest.approx(
        [3 / 6, 1 / 6, 2 / 6, 0]
    )


def test_remaining_mass_of_a_complete_history_goes_to_eos():
    # After 0 both 0 and </s>, the whole vocabulary, were seen.
    model = estimate_katz(count_ngrams([[0, 0]] * 3, order=2))
    assert model.log_backoffs[0][0] == -99
    probability = np.exp(model.log_prob([0], 0))
    assert probability < 0.5
    assert np.exp(model.log_prob([0], model.eos)) == pytest.approx(1 - probability)


def test_inconsistent_counts_are_refused():
    counts = count_ngrams([[0, 0]] * 3, order=2)
    for followed in (0.0, 4.0):
        changed = dataclasses.replace(counts, followed=(np.full(3, followed),))
        with pytest.raises(UserError, match="the extensions of a history are more"):
            estimate_katz(changed)

    begins = NGramCounts(1, (np.array([2]),), (np.array([3]),), ())
    # The n-grams 0, 1, 0 0, 0 1 and 1 0: the mass of a complete history would be lost.
    keys = np.array([0, 1]), np.array([0, 1, 4])
    numbers = np.array([4, 2]), np.array([2, 2, 1])
    endless = NGramCounts(2, keys, numbers, (np.array([4.0, 2.0]),))
    for counts, message in (
        (begins, "there is no unigram but <s>"),
        (endless, "the counts lack </s>"),
    ):
        with pytest.raises(UserError, match=message):
            estimate_katz(counts)
