"""Bad settings end with one sentence that names the setting."""

import dataclasses

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.blockwise_config import BlockHeadsConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from tests.training.runs import with_trunk

HEADS = HeadsTrainConfig(
    model="model",
    data="texts",
    heads=BlockHeadsConfig(4, 32),
    optimizer=OptimizerConfig(1),
)
DRAFTER = dataclasses.replace(HEADS, heads=BlockDrafterConfig((0,), block_size=4))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"length": 17}, "length = 17 exceeds TransformerConfig.max_length = 16"),
        ({"head_weights": (1.0,)}, "must hold 3 numbers"),
        ({"head_weights": (1.0, -1.0, 1.0)}, "head_weights"),
    ],
)
def test_invalid_runs_are_refused(train_config, changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(train_config, **changes)


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (
            HEADS,
            {"optimizer": OptimizerConfig(1, trunk_learning_rate=0.1)},
            "trunk_learning_rate is for the training of a whole model",
        ),
        (HEADS, {"heads": BlockHeadsConfig(1, 4)}, "leaves no head to train"),
        (
            HEADS,
            {"heads": BlockHeadsConfig(3, 4, first_has_ffn=True)},
            "first_has_ffn",
        ),
        (HEADS, {"position_weights": "dpace"}, "is for block drafters"),
        (HEADS, {"soft_targets": 0.5, "mode": "ring"}, "requires mode = 'cache'"),
        (HEADS, {"head_weights": (1.0,)}, "must hold 3 numbers"),
        (DRAFTER, {"mode": "ring"}, "must be 'cache'"),
        (
            DRAFTER,
            {"position_weights": "dpace", "head_weights": (1.0, 1.0, 1.0)},
            "head_weights has no effect",
        ),
        (DRAFTER, {"head_weights": (1.0,)}, "must hold 3 numbers"),
    ],
)
def test_invalid_trainings_of_heads_are_refused(config, changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(config, **changes)


def test_a_list_of_head_weights_is_kept_as_a_tuple(train_config):
    config = dataclasses.replace(train_config, head_weights=[1, 0.5, 0])
    assert config.lambdas == (1, 0.5, 0)


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
def test_half_precision_is_bfloat16(train_config, name):
    half, bfloat16 = (
        with_trunk(train_config.model, **{name: dtype})
        for dtype in ("float16", "bfloat16")
    )
    with pytest.raises(UserError, match=f"{name} = 'float16' rounds most gradients"):
        dataclasses.replace(train_config, model=half)
    dataclasses.replace(train_config, model=bfloat16)
