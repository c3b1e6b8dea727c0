"""Compares scores with those of KenLM, which reads the written files."""

import numpy as np
import pytest

from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.formats.arpa import write_arpa
from bpd_jax.ngrams.formats.openfst import write_fst
from bpd_jax.ngrams.formats.openfst_reader import model_from_fst
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.prune import prune

kenlm = pytest.importorskip("kenlm")
TOKENS = 60


def sequences(seed, number):
    """Texts in which a token depends on the two tokens before it."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(number):
        text = [0, 0]
        for _ in range(rng.integers(1, 15)):
            step = min(int(rng.geometric(0.3)), 9)
            text.append((3 * text[-1] + 5 * text[-2] + step) % TOKENS)
        texts.append(np.array(text[2:], np.int32))
    return texts


@pytest.fixture(scope="module", params=["whole", "pruned", "order 2"])
def model(request):
    order = 2 if request.param.endswith("2") else 4
    counts = count_ngrams(sequences(1, 800), order=order, vocab_size=TOKENS)
    model = estimate_katz(counts)
    return prune(model, model.sizes[0] + 900) if request.param == "pruned" else model


@pytest.fixture(params=["plain", "gzip", "through OpenFst"])
def scorer(request, model, tmp_path):
    path = tmp_path / "model.arpa"
    if request.param == "gzip":
        path = tmp_path / "model.arpa.gz"
    if request.param == "through OpenFst":
        write_fst(model, tmp_path / "model.fst")
        model = model_from_fst(tmp_path / "model.fst", vocab_size=TOKENS)
    write_arpa(model, path)
    return kenlm.Model(str(path))


def test_scores_equal_kenlms(model, scorer):
    assert scorer.order == model.order
    longest = 0
    for tokens in sequences(2, 200):
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
