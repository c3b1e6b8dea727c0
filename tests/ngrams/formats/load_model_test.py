import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.formats.load_model import load_model


def test_missing_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no .*missing"):
        load_model(tmp_path / "missing")
    with pytest.raises(UserError, match="an n-gram model"):
        load_model(tmp_path)
