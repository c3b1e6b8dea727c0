"""The recurrent refiner reads the tokens of its own path."""

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.recurrent import RecurrentRefiner
from bpd_jax.drafting.refiners.weights import Weight, WeightedParams
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.models.trained_refiners import RecurrentConfig, init_refiner
from tests.drafting.naive import check_every_search, make_model, make_view

LENGTH, WIDTH = 4, 3


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(w, state, token):
    new = w["embedding"][token] @ w["kernel_token"] + w["bias_token"]
    old = state @ w["kernel_state"] + w["bias_state"]
    (new_r, new_z, new_n), (old_r, old_z, old_n) = np.split(new, 3), np.split(old, 3)
    keep = sigmoid(new_z + old_z)
    candidate = np.tanh(new_n + sigmoid(new_r + old_r) * old_n)
    return keep * state + (1 - keep) * candidate


def test_every_search_sees_the_recurrent_corrections():
    view = make_view(make_model(0, block_size=LENGTH))
    config = RecurrentConfig(13, 16, LENGTH, rank=5, width=6)
    shapes = jax.eval_shape(lambda: init_refiner(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    w = jax.tree.map(lambda leaf: rng.normal(0, 0.7, leaf.shape), shapes)
    lattice = jax.device_get(
        view.model.lattice(view.hidden, view.next_token, LENGTH, WIDTH)
    )
    hidden = np.asarray(view.hidden)

    def offer(row, path):
        level = 1 + len(path)
        unit = hidden[row] / np.sqrt(np.mean(hidden[row] ** 2))
        state = np.tanh(unit @ w["kernel_start"] + w["bias_start"])
        for token in [int(view.next_token[row]), *path]:
            state = gru(w, state, token)
        tokens = lattice.tokens[row, level]
        scores = w["output"][tokens] @ ((state @ w["project"]) * w["scale"][level - 1])
        return tokens, lattice.log_probs[row, level] + 0.6 * scores

    arrays = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), w)
    refiner = RecurrentRefiner(WeightedParams(Weight.of(0.6), arrays))
    paths = Paths(HeadsSource(LENGTH, WIDTH), (), (refiner,))
    check_every_search(paths, view, offer)
