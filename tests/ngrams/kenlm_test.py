"""Compares scores with those of KenLM, which reads the written files."""

import numpy as np
import pytest

from bpd_jax.ngrams.formats.arpa import write_arpa
from bpd_jax.ngrams.prune import prune

kenlm = pytest.importorskip("kenlm")


@pytest.fixture(params=["whole", "pruned"])
def model(request, trigrams):
    pruned = request.param == "pruned"
    return prune(trigrams, trigrams.sizes[0] + 40) if pruned else trigrams


@pytest.fixture(params=["model.arpa", "model.arpa.gz"])
def scorer(request, model, tmp_path):
    path = tmp_path / request.param
    write_arpa(model, path)
    return kenlm.Model(str(path))


def test_scores_equal_kenlms(model, scorer, corpus):
    assert scorer.order == model.order
    longest = 0
    for tokens in corpus:
        text = [model.bos, *tokens.tolist(), model.eos]
        actual = [model.log_prob(text[:n], text[n]) for n in range(1, len(text))]
        expected = list(scorer.full_scores(" ".join(map(str, tokens))))
        assert not any(unknown for _, _, unknown in expected)
        np.testing.assert_allclose(
            np.array(actual) / np.log(10),
            [score for score, _, _ in expected],
            atol=1e-4,
        )
        longest = max(longest, *(length for _, length, _ in expected))
    assert longest == model.order
