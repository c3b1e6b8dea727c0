import dataclasses

import pytest

from bpd_jax.errors import UserError
from bpd_jax.training.config import OptimizerConfig


@pytest.mark.parametrize(
    "weights", [1.0, "abc", ("a", "b", "c"), (float("nan"), 1, 1), (True, 1, 1), ()]
)
def test_head_weights_are_numbers(train_config, weights):
    message = "head_weights"
    with pytest.raises(UserError, match=message):
        dataclasses.replace(train_config, head_weights=weights)


def test_a_list_of_head_weights_is_kept_as_a_tuple(train_config):
    config = dataclasses.replace(train_config, head_weights=[1, 0.5, 0])
    assert config.lambdas == (1, 0.5, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"start": 3}, "start must be text"),
        ({"start": ""}, "start must be text"),
        ({"steps": True}, "steps must be a positive integer, not True"),
        ({"patience": True}, "patience must be a positive integer, not True"),
        ({"seed": False}, "seed must be an integer"),
    ],
)
def test_invalid_values_are_reported(train_config, change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(train_config, **change)


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
def test_half_precision_is_bfloat16(train_config, name):
    def with_dtype(dtype):
        trunk = dataclasses.replace(train_config.model.trunk, **{name: dtype})
        model = dataclasses.replace(train_config.model, trunk=trunk)
        return dataclasses.replace(train_config, model=model)

    with pytest.raises(UserError, match=f"{name} = 'float16' rounds most gradients"):
        with_dtype("float16")
    with_dtype("bfloat16")


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"learning_rate": float("inf")},
            "learning_rate must be a finite",
        ),
        (
            {"learning_rate": float("nan")},
            "learning_rate must be a finite",
        ),
        ({"clip_norm": float("inf")}, "clip_norm must be a finite number"),
        ({"warmup_steps": True}, "warmup_steps must be an integer"),
    ],
)
def test_invalid_optimizers_are_reported(change, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**{"learning_rate": 1e-3, **change})
