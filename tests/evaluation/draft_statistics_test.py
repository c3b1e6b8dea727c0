"""Statistics of drafts by hand; the grid of the oracle against the oracle method."""

import numpy as np
import pytest

from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.replay import record
from bpd_jax.evaluation.draft_statistics import (
    draft_statistics,
    oracle_calls,
    repetition,
)

NAN, X = np.nan, 99


@pytest.mark.parametrize(
    "drafts, share, run",
    [
        # The example of the docstring.
        ([[7, 7, 7, 8], [1, 2, 3, 4]], 1 / 3, 2.0),
        # A run ends at another token; the longest run is counted.
        ([[5, 5, 6, 6, 6, 5]], 3 / 5, 3.0),
        # Drafts of one token are ignored.
        ([[5, -1, -1], [5, 5, -1]], 1.0, 2.0),
        ([[5, -1], [6, -1]], None, None),
    ],
)
def test_repetition_of_drafts(drafts, share, run):
    assert repetition(np.array(drafts)) == (pytest.approx(share), run)


def test_statistics_cover_all_calls_of_all_prompts(make_generation):
    first = make_generation(
        [1] * 5,
        2,
        proposed=np.array([[5, 5, 5, 6], [1, 2, 3, 4]]),
        accepted=np.array([4, 1]),
        nodes=np.array([10, 6]),
        entropies=np.array([[0, 1.0, 2.0, NAN], [0, 4.0, NAN, NAN]]),
    )
    second = make_generation(
        [1] * 2,
        1,
        proposed=np.array([[7, 7, -1, -1]]),
        accepted=np.array([2]),
        nodes=np.array([2]),
        entropies=np.array([[0, 4.0, NAN, NAN]]),
    )
    statistics = draft_statistics([first, second])
    assert statistics.nodes == 6.0
    assert statistics.repeated == pytest.approx((2 + 0 + 1) / (3 + 3 + 1))
    assert statistics.longest_run == (3 + 1 + 2) / 3
    # Of head 2 three times, of head 3 once, of head 4 never.
    assert statistics.entropies == (3.0, 2.0)
    assert statistics.accepted == pytest.approx((1 / 3, 1 / 3, 0, 1 / 3))


@pytest.fixture(scope="module")
def recorded(decoder, prompts):
    options = DecodeOptions(max_new_tokens=40, end_of_text=0, batch_size=3)
    texts = decoder.decode(GREEDY, prompts, options)
    return record(decoder, texts, options, width=6)


@pytest.mark.parametrize("heads, width", [(2, 1), (3, 2), (4, 3)])
def test_every_cell_equals_the_oracle_method(recorded, heads, width):
    replayed = recorded.decode(parse_method(f"oracle:k={width}:heads={heads}"))
    for text, generation in zip(recorded.texts, replayed, strict=True):
        grid = oracle_calls(text.candidates, text.output_ids)
        assert grid[heads - 2, width - 1] == generation.serial_calls
