"""Tests of bpd_jax.ngrams.sample."""

from collections import Counter

import numpy as np
import pytest

from bpd_jax.errors import UserError
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.prune import prune
from bpd_jax.ngrams.sample import sample

NUMBER = 20_000


def chi_square(observed: Counter[int], expected: np.ndarray) -> float:
    """Pearson's statistic over the events with five or more expected counts."""
    frequent = np.flatnonzero(expected >= 5)
    counts = np.array([observed[event] for event in frequent.tolist()])
    statistic = ((counts - expected[frequent]) ** 2 / expected[frequent]).sum()
    rare = expected.sum() - expected[frequent].sum()
    seen = sum(observed.values()) - counts.sum()
    if rare >= 5:
        statistic += (seen - rare) ** 2 / rare
    return float(statistic)


@pytest.mark.parametrize("context", [[], [0], [0, 1], [1, 0, 0], [8, 7], [3, 9], None])
@pytest.mark.parametrize("pruned", [False, True])
def test_the_next_token_has_the_models_distribution(
    trigrams: NGramModel, context: list[int] | None, pruned: bool
) -> None:
    model = prune(trigrams, trigrams.sizes[0] + 30) if pruned else trigrams
    rng = np.random.default_rng(1)
    found = sample(model, rng, NUMBER, max_length=1, context=context)
    observed = Counter(
        model.eos if not sequence.size else int(sequence[0])
        for sequence in found.sequences
    )
    before = [model.bos] if context is None else context
    events = np.arange(model.width)
    log_probs = model.log_probs_of(
        np.tile(before, (events.size, 1)).astype(int), events
    )
    # Ten events: the statistic is above 30 once in 2000 times.
    assert chi_square(observed, NUMBER * np.exp(log_probs)) < 30


def test_texts_have_the_models_distribution(trigrams: NGramModel) -> None:
    found = sample(trigrams, np.random.default_rng(2), NUMBER, max_length=3)
    texts = Counter(
        (*sequence.tolist(), *([trigrams.eos] if ended else []))
        for sequence, ended in zip(found.sequences, found.ended, strict=True)
    )
    for text, count in texts.most_common(40):
        whole = [trigrams.bos, *text]
        log_prob = sum(
            trigrams.log_prob(whole[:place], whole[place])
            for place in range(1, len(whole))
        )
        # A text cut at three tokens goes on with anything but the end.
        if text[-1] != trigrams.eos:
            assert len(text) == 3
            log_prob += np.log1p(-np.exp(trigrams.log_prob(whole, trigrams.eos)))
        expected = NUMBER * np.exp(log_prob)
        assert abs(count - expected) < 5 * np.sqrt(expected)


def test_sequences_end_or_reach_the_limit(document_model: NGramModel) -> None:
    found = sample(document_model, np.random.default_rng(3), 200, max_length=4)
    lengths = np.array([sequence.size for sequence in found.sequences])
    assert found.ended.any()
    assert not found.ended.all()
    assert (lengths[~found.ended] == 4).all()
    assert lengths.max() == 4
    assert all(sequence.dtype == "int32" for sequence in found.sequences)
    assert all((sequence < 9).all() for sequence in found.sequences)
    assert np.isfinite(document_model.perplexity(found.sequences))


def test_the_same_seed_gives_the_same_texts(trigrams: NGramModel) -> None:
    one, two = (
        sample(trigrams, np.random.default_rng(4), 50, max_length=9).sequences
        for _ in range(2)
    )
    assert [text.tolist() for text in one] == [text.tolist() for text in two]


def test_end_of_text_in_the_context_begins_a_text(document_model: NGramModel) -> None:
    texts = [
        sample(
            document_model, np.random.default_rng(5), 50, max_length=5, context=before
        )
        for before in (None, [0, 1, 9], [document_model.bos])
    ]
    for text in texts[1:]:
        for one, two in zip(texts[0].sequences, text.sequences, strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_model_read_from_disk_and_unigrams(trigrams: NGramModel, tmp_path) -> None:
    trigrams.save(tmp_path / "model")
    again = NGramModel.load(tmp_path / "model")
    one, two = (
        sample(model, np.random.default_rng(6), 20, max_length=5)
        for model in (trigrams, again)
    )
    for ours, theirs in zip(one.sequences, two.sequences, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    unigrams = prune(trigrams, trigrams.sizes[0])
    assert sample(unigrams, np.random.default_rng(7), 20, max_length=5).ended.any()


@pytest.mark.parametrize("number, length", [(0, 5), (5, 0)])
def test_nothing_to_draw_is_refused(
    trigrams: NGramModel, number: int, length: int
) -> None:
    with pytest.raises(UserError, match="both must be 1 or more"):
        sample(trigrams, np.random.default_rng(0), number, max_length=length)
