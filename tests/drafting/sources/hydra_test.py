"""Hydra heads read the tokens of their own path."""

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.sources.hydra import HydraSource
from bpd_jax.models.trained_refiners import HydraConfig
from tests.drafting.naive import check_every_search, make_model, make_view

LENGTH, WIDTH = 4, 3


def unit(vector):
    return vector / np.sqrt(np.mean(vector**2) + 1e-12)


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
        w = params[f"level_{level}"]
        inputs = [hidden[row], *embedding[[int(view.next_token[row]), *path]]]
        inner = w["bias_in"] + sum(
            unit(vector) @ kernel
            for vector, kernel in zip(inputs, w["kernel_in"], strict=True)
        )
        inner = inner / (1 + np.exp(-inner))
        state = hidden[row] + inner @ w["kernel_out"] + w["bias_out"]
        logits = embedding @ state
        log_probs = logits - np.logaddexp.reduce(logits)
        tokens = np.argsort(-log_probs)[:WIDTH]
        return tokens, log_probs[tokens]

    arrays = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), params)
    source = HydraSource(LENGTH, WIDTH, config, arrays)
    check_every_search(Paths(source), view, offer)
