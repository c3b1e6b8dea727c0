"""The draft model's paths are its own continuations."""

import numpy as np

from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.small_lm import SmallLM
from bpd_jax.drafting.sources.draft_model import DraftModelSource
from tests.drafting.naive import (
    check_every_search,
    make_model,
    make_view,
    slow_read,
    whole_text,
)

LENGTH, WIDTH = 4, 3


def test_every_search_grows_the_draft_models_continuations():
    small = make_model(3)
    view = make_view(make_model(0))

    def offer(row, path):
        log_probs = slow_read(small, [*whole_text(view, row), *path])
        tokens = np.argsort(-log_probs)[:WIDTH]
        return tokens, log_probs[tokens]

    source = DraftModelSource(LENGTH, WIDTH, SmallLM(small.sizes, LENGTH), small.params)
    check_every_search(Paths(source), view, offer)
