"""Hydra heads read the tokens of their own path."""

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.sources.hydra import HydraSource
from bpd_jax.models.trained_refiners import HydraConfig
from tests.drafting.naive import (
    LENGTH,
    WIDTH,
    check_every_search,
    make_model,
    make_view,
)
from tests.models.trained_refiners_test import hydra_state


def test_every_search_grows_paths_of_the_sequential_heads():
    base = make_model(0, block_size=LENGTH)
    view = make_view(base)
    config = HydraConfig(13, 16, LENGTH, width=8)
    rng = np.random.default_rng(0)
    params = {
        f"level_{level}": {
            "kernel_in": rng.normal(0, 0.3, (1 + level, 16, 8)),
            "bias_in": rng.normal(0, 0.3, 8),
            "kernel_out": rng.normal(0, 0.5, (8, 16)),
            "bias_out": rng.normal(0, 0.3, 16),
        }
        for level in config.levels
    }
    embedding = np.asarray(base.params["trunk"]["embedding"])
    hidden = np.asarray(view.hidden)

    def offer(row, path):
        level = 1 + len(path)
        embedded = embedding[[int(view.next_token[row]), *path]]
        state = hydra_state(params[f"level_{level}"], hidden[row], embedded)
        logits = embedding @ state
        log_probs = logits - np.logaddexp.reduce(logits)
        tokens = np.argsort(-log_probs)[:WIDTH]
        return tokens, log_probs[tokens]

    arrays = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), params)
    source = HydraSource(LENGTH, WIDTH, config, arrays)
    check_every_search(Paths(source), view, offer)
