"""A model made ready for decoding."""

import jax
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.decoding_parameters import prepared
from bpd_jax.models.model import Model
from tests.decoding.random_models import make_model


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="other devices do not expand matrices"
)
def test_rounded_matrices_are_refused_where_they_would_be_expanded():
    model = make_model(2, num_layers=1)
    with pytest.raises(UserError, match="gains nothing with precision=bfloat16"):
        prepared(model.config, model.params, None, "bfloat16", rounds=True)


def test_what_is_quantized_is_not_rounded_again(capsys):
    model = make_model(2, num_layers=1, d_model=32)
    for sentence in ("rounded to 8 bits", "none is rounded"):
        config, params, _ = prepared(
            model.config, model.params, None, None, rounds=True
        )
        assert sentence in capsys.readouterr().err
        model = Model(config, params)
