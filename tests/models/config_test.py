"""Configurations of models: invalid settings are refused, and files keep all others."""

import dataclasses

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.config_files import load_config, save_config
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.mesh import MeshConfig
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.trained_refiners import MarkovConfig
from bpd_jax.models.transformer_config import TransformerConfig, usual_layers

TRUNK = TransformerConfig(
    23, 2, 16, 24, num_heads=4, num_kv_heads=2, rotary=RotaryConfig(100.0)
)
DRAFTER = BlockDrafterConfig((0, 1), 4, num_heads=4, window=6)
HEADS = BlockHeadsConfig(3, 4)
MARKOV = MarkovConfig(97, 8, 4, rank=5)


@pytest.mark.parametrize(
    "config, change, message",
    [
        (TRUNK, {"num_heads": 3}, "not a multiple of num_heads"),
        (TRUNK, {"num_kv_heads": 3}, "num_kv_heads"),
        (TRUNK, {"head_dim": 5}, "head_dim = 5 is odd"),
        (TRUNK, {"experts": 5, "chosen_experts": 6, "gated": True}, "chosen_experts"),
        (TRUNK, {"experts": 5, "chosen_experts": 2}, "gated"),
        (DRAFTER, {"block_size": 1}, "block_size must be at least 2"),
        (DRAFTER, {"window": 3}, "smaller than block_size"),
        (DRAFTER, {"window": None, "moving_window": True}, "needs a window"),
        (DRAFTER, {"confidence_reads_markov": True}, "markov_rank above 0"),
        (MeshConfig(), {"data": -2}, "positive integer, or -1 for the remaining"),
        (RotaryConfig(), {"low_factor": 4.0}, "high_factor must be above low_factor"),
        (RotaryConfig(), {"beta_fast": 1.0}, "beta_fast must be above beta_slow"),
        (RotaryConfig(), {"scaling": "yarn"}, "original_length is missing for yarn"),
        (HEADS, {"hidden": None}, "hidden must be a positive"),
        (HEADS, {"layers": 2}, "layers = 2"),
        (HEADS, {"kind": "medusa"}, "hidden = 4 does not apply"),
        (HEADS, {"own_softmax": True, "reads_anchor": True}, "feed-forward"),
        (
            BlockwiseConfig(TRUNK, HEADS),
            {"heads": BlockHeadsConfig(3, 4, draft_vocabulary=24)},
            "draft_vocabulary = 24 exceeds the 23 tokens",
        ),
        (MARKOV, {"num_heads": 1}, "MarkovConfig.num_heads"),
    ],
)
def test_invalid_settings_are_refused(config, change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(config, **change)


@pytest.mark.parametrize(
    "config",
    [
        BlockwiseConfig(dataclasses.replace(TRUNK, rotary=None)),
        BlockwiseConfig(TRUNK, BlockHeadsConfig(4, kind="medusa", layers=2)),
        BlockwiseConfig(TRUNK, drafter=DRAFTER),
    ],
)
def test_loaded_configurations_equal_those_saved(config, tmp_path):
    save_config(config, tmp_path / "model.json")
    assert load_config(tmp_path / "model.json") == config


def test_sizes_of_a_drafter_default_to_those_of_the_target():
    target = dataclasses.replace(TRUNK, num_heads=6, num_kv_heads=3, head_dim=4)
    resolved = BlockDrafterConfig(feature_layers=[1]).resolve(target)
    assert (resolved.d_ff, resolved.num_heads, resolved.num_kv_heads) == (24, 6, 3)
    assert (resolved.head_dim, resolved.rotary) == (4, target.rotary)
    default = dataclasses.replace(resolved, feature_layers=())
    assert default.resolve(target).feature_layers == usual_layers(target.num_layers)
    wider = dataclasses.replace(target, num_heads=12, d_ff=48)
    assert resolved.resolve(wider) == resolved


@pytest.mark.parametrize(
    "change", [{"feature_layers": (4,)}, {"draft_vocabulary": 24}], ids=str
)
def test_drafters_of_another_target_are_refused(change):
    with pytest.raises(UserError, match=r"the model has|vocabulary"):
        dataclasses.replace(DRAFTER, **change).resolve(TRUNK)
