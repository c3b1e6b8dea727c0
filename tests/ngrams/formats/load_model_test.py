"""Tests of bpd_jax.ngrams.formats.load_model."""

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.formats.arpa import write_arpa
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.formats.openfst import write_fst
from tests.ngrams.helpers import assert_same


@pytest.mark.parametrize("symbols", [None, [*"abcdefgh", "é", "<|endoftext|>"]])
def test_every_format_is_loaded(document_model, tmp_path, symbols):
    document_model.save(tmp_path / "folder")
    write_fst(document_model, tmp_path / "model.fst", symbols)
    write_arpa(document_model, tmp_path / "model.gz", symbols)
    for name in ("folder", "model.fst", "model.gz"):
        model = load_model(
            tmp_path / name, vocab_size=10, end_of_text=9, symbols=symbols
        )
        assert_same(model, document_model, rtol=1e-6, atol=1e-6)
        assert model.end_of_text == 9


def test_missing_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no .*missing"):
        load_model(tmp_path / "missing")
    with pytest.raises(UserError, match="an n-gram model"):
        load_model(tmp_path)
