"""The recurrent refiner reads the tokens of its own path."""

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.refiners.recurrent import RecurrentRefiner
from bpd_jax.drafting.refiners.weights import Weight, WeightedParams
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.models.trained_refiners import RecurrentConfig, init_refiner
from tests.drafting.naive import (
    LENGTH,
    WIDTH,
    check_every_search,
    lattice_of,
    make_model,
    make_view,
)
from tests.models.trained_refiners_test import unrolled_recurrent


def test_every_search_sees_the_recurrent_corrections():
    view = make_view(make_model(0, block_size=LENGTH))
    config = RecurrentConfig(13, 16, LENGTH, rank=5, width=6)
    shapes = jax.eval_shape(lambda: init_refiner(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    w = jax.tree.map(lambda leaf: rng.normal(0, 0.7, leaf.shape), shapes)
    lattice = lattice_of(view)
    hidden = np.asarray(view.hidden)

    def offer(row, path):
        level = 1 + len(path)
        whole_path = [int(view.next_token[row]), *path]
        scores = unrolled_recurrent(w, hidden[row], whole_path)[-1]
        tokens = lattice.tokens[row, level]
        return tokens, lattice.log_probs[row, level] + 0.6 * scores[tokens]

    arrays = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), w)
    refiner = RecurrentRefiner(WeightedParams(Weight.of(0.6), arrays))
    paths = Paths(HeadsSource(LENGTH, WIDTH), (), (refiner,))
    check_every_search(paths, view, offer)
