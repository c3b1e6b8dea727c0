"""A model with the architecture of Llama is trained, saved and loaded."""

import dataclasses

import jax
import numpy as np
import pytest

from bpd_jax.models.blockwise_config import load_config
from bpd_jax.models.model import Model
from bpd_jax.models.partitioning import MeshConfig
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.training.checkpoints import load_parameters
from bpd_jax.training.metrics import read_rows
from bpd_jax.training.trainer import train


@pytest.mark.exhaustive
def test_train_save_and_load(train_config, tmp_path):
    trunk = dataclasses.replace(
        train_config.model.trunk,
        num_kv_heads=2,
        activation="silu",
        gated=True,
        use_bias=False,
        query_key_norm=True,
        norm="rms",
        rotary=RotaryConfig(),
        tied_softmax=False,
    )
    model = dataclasses.replace(train_config.model, trunk=trunk)
    mesh = MeshConfig(data=4, fsdp=2)
    config = dataclasses.replace(train_config, model=model, mesh=mesh, steps=3)
    train(config, tmp_path)
    losses = [
        row["loss"] for row in read_rows(tmp_path / "metrics.jsonl") if "loss" in row
    ]
    assert losses[-1] < losses[0]
    config = load_config(tmp_path / "model.json")
    assert config == model
    params = load_parameters(tmp_path / "checkpoints", config)
    # All parameters were trained: even the scales of norms, which started at 1, vary.
    assert all(np.ptp(leaf) > 0 for leaf in jax.tree.leaves(params))
    hidden = np.ones((1, 16), np.float32)
    logits = Model(config, params).head_logits(hidden)
    assert np.isfinite(logits).all()
    assert np.abs(logits[:, 0] - logits[:, 1]).max() > 0
