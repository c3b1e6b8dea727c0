"""Drafting only while calls yield more tokens than they cost, on scripted models."""

import numpy as np
import pytest

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import Task, generate
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.gate import GatedDrafter
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.searches.tree import BestFirst
from bpd_jax.drafting.sources.heads import HeadsSource
from tests.decoding.random_models import ScriptedModel, make_model, make_prompts

OPTIONS = DecodeOptions(max_new_tokens=60, batch_size=2)
NEVER = 97  # Divides no position.


def calls_on_script(right, price):
    """Numbers of accepted tokens and of nodes by call, of a row on a script."""
    script = tuple(int(t) for t in np.random.default_rng(0).integers(0, 50, 90))
    model = ScriptedModel(script, right=(right, NEVER))
    drafter = GatedDrafter(PathDrafter(Paths(HeadsSource(3, 1)), BestFirst(3)), price)
    [text] = generate(Task(model, drafter, OPTIONS), [np.array([9, 9, 9])])
    assert text.output_ids.tolist() == list(script[2:62])
    return text.accepted.tolist(), text.nodes.tolist(), text.entropies


def test_drafts_stop_when_none_is_accepted_and_are_tried_again():
    accepted, nodes, entropies = calls_on_script(NEVER, price=1.5)
    assert set(accepted) == {1}
    drafted = [call for call, count in enumerate(nodes) if count > 1]
    # The average falls from 2.5 to below 1.5 in four calls; then each 17th call tries.
    assert drafted == [0, 1, 2, 3, 20, 37, 54]
    assert set(nodes) == {1, 3}
    without = np.isnan(entropies).all(1)
    assert np.flatnonzero(~without).tolist() == drafted


@pytest.mark.parametrize("right, price", [(1, 1.9), (NEVER, 1.0)])
def test_drafts_go_on_while_they_pay(right, price):
    accepted, nodes, _ = calls_on_script(right, price)
    assert set(nodes[:-1]) == {3}
    assert set(accepted) == ({2} if right == 1 else {1})


def test_rows_of_a_batch_draft_together_and_texts_stay():
    decoder = Decoder(make_model(0), width=3)
    prompts = make_prompts([3, 1, 9])
    plain, dear, cheap = (
        decoder.decode(parse_method(method), prompts, OPTIONS)
        for method in ("greedy", "heads/tree:6:price=3", "heads/tree:6:price=1")
    )
    for texts in (dear, cheap):
        for text, expected in zip(texts, plain, strict=True):
            np.testing.assert_array_equal(text.output_ids, expected.output_ids)
    assert min(text.nodes.min() for text in dear) == 1
    assert all(text.nodes.min() == 6 for text in cheap)
    shortest = min(dear[0].serial_calls, dear[1].serial_calls)
    alike = [(text.nodes[:shortest] > 1).tolist() for text in dear[:2]]
    assert alike[0] == alike[1]
