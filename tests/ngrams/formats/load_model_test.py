"""Tests of bpd_jax.ngrams.formats.load_model."""

import pathlib

import pytest

from bpd_jax.errors import UserError
from bpd_jax.ngrams.formats.arpa import write_arpa
from bpd_jax.ngrams.formats.fst_files import write_fst
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.model import NGramModel


@pytest.mark.parametrize("symbols", [None, list("abcdefghij")])
def test_every_format_is_loaded(
    document_model: NGramModel, tmp_path: pathlib.Path, symbols: list[str] | None
) -> None:
    document_model.save(tmp_path / "folder")
    write_fst(document_model, tmp_path / "model.fst", symbols)
    write_arpa(document_model, tmp_path / "model.gz", symbols)
    for name in ("folder", "model.fst", "model.gz"):
        model = load_model(
            tmp_path / name, vocab_size=10, end_of_text=9, symbols=symbols
        )
        assert model.sizes == document_model.sizes
        assert model.end_of_text == 9
        expected = document_model.log_prob([0, 1], 2)
        assert model.log_prob([0, 1], 2) == pytest.approx(expected, abs=1e-5)


def test_missing_model_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*missing"):
        load_model(tmp_path / "missing")
    with pytest.raises(UserError, match="an n-gram model"):
        load_model(tmp_path)
