"""Compares scores with those of KenLM, which reads the written files."""

import numpy as np
import pytest

from bpd_jax.ngrams.formats.arpa import write_arpa
from bpd_jax.ngrams.formats.openfst import write_fst
from bpd_jax.ngrams.formats.openfst_reader import model_from_fst
from bpd_jax.ngrams.prune import prune

kenlm = pytest.importorskip("kenlm")


@pytest.fixture(params=["whole", "pruned"])
def model(request, trigrams):
    pruned = request.param == "pruned"
    return prune(trigrams, trigrams.sizes[0] + 40) if pruned else trigrams


@pytest.fixture(params=["plain", "gzip", "through OpenFst"])
def scorer(request, model, tmp_path):
    path = tmp_path / "model.arpa"
    if request.param == "gzip":
        path = tmp_path / "model.arpa.gz"
    if request.param == "through OpenFst":
        write_fst(model, tmp_path / "model.fst")
        model = model_from_fst(tmp_path / "model.fst", vocab_size=10)
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
