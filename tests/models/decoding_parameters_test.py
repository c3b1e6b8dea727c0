"""A model made ready for decoding."""

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.decoding_parameters import check_precision, prepared
from bpd_jax.models.model import Model
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import make_model

EXPERTS = {"experts": 4, "chosen_experts": 2, "gated": True, "mlp_bias": False}
SIZES = {"d_model": 64, "d_ff": 96, "num_heads": 4, "head_dim": 16, "num_layers": 1}


# Kernels for another width of vectors refuse other sizes.
@pytest.mark.usefixtures("instructions")
@pytest.mark.instructions("avx2")
@pytest.mark.parametrize(
    "options, sizes, message",
    [
        ({"precision": "bfloat16", "rounds": True}, {}, "gains nothing with prec.*bf"),
        ({"precision": None, "rounds": True}, EXPERTS, "does not round experts"),
        ({"precision": "int8"}, EXPERTS, "precision=int8 is not for models of exp"),
        ({"precision": "int8"}, {"head_dim": 12}, "heads have a multiple of .*, not 1"),
        ({"precision": "int8"}, {"d_model": 80}, "d_model of this model has 80 feat"),
        ({"precision": "int8"}, {"d_ff": 100}, "d_ff of this model has 100 features"),
        (
            {"precision": "int8"},
            {"num_heads": 3, "head_dim": 16},
            "attention of this model has 48",
        ),
    ],
)
def test_models_that_cannot_be_prepared_are_refused(options, sizes, message):
    config = TransformerConfig(13, **{**SIZES, **sizes})
    with pytest.raises(UserError, match=message):
        check_precision(config, None, **options)


@pytest.mark.instructions("avx2", "avx512", "no kernels")
@pytest.mark.parametrize("features", [8, 16])
def test_integers_are_multiplied_where_there_is_a_kernel(instructions, features):
    config = TransformerConfig(13, **{**SIZES, "head_dim": features})
    refused = {"no kernels": "needs a CPU with AVX2"}
    if features == 8:
        refused["avx512"] = "multiple of 16 features, not 8"
    if instructions in refused:
        with pytest.raises(UserError, match=refused[instructions]):
            check_precision(config, None, "int8")
    else:
        check_precision(config, None, "int8")


def test_what_is_quantized_is_not_rounded_again(capsys):
    model = make_model(2, num_layers=1, d_model=32)
    for sentence in ("rounded to 8 bits", "none is rounded"):
        config, params, _ = prepared(
            model.config, model.params, None, None, rounds=True
        )
        assert sentence in capsys.readouterr().err
        model = Model(config, params)
