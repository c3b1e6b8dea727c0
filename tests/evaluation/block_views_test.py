import dataclasses

import numpy as np
import pytest

from bpd_jax.decoding.methods import parse_method
from bpd_jax.evaluation.block_views import most_improved_block


@pytest.mark.parametrize(
    "refined, label",
    [
        ("ngram:3", "3-best 3-gram"),
        ("zero_gram:3", "3-best 0-gram"),
        (None, None),
    ],
)
def test_block_is_a_serial_call_of_bpd(decoder, results, refined, label):
    bpd = results["bpd"]
    view = most_improved_block(decoder, [bpd, *([results[refined]] if refined else [])])
    labels = ["BPD", label, "Oracle"] if refined else ["BPD", "Oracle"]
    assert [path.label for path in view.paths] == labels
    assert view.tokens.shape == view.log_probs.shape == (4, 6)

    # The block begins at a serial call of BPD, and BPD's path is that call's draft.
    calls = {}
    for generation in bpd.generations:
        end, tokens = 0, generation.output_ids
        for draft, accepted in zip(generation.drafts, generation.accepted, strict=True):
            text = np.concatenate([generation.input_ids, tokens[:end]])
            calls[text.tobytes()] = draft, accepted, tokens[end : end + 4]
            end += accepted
    draft, accepted, greedy = calls[view.text.tobytes()]
    np.testing.assert_array_equal(view.greedy, greedy)
    np.testing.assert_array_equal(view.tokens[:, 0], draft)
    assert view.paths[0].accepted == accepted

    for path in view.paths:
        drafted = view.tokens[np.arange(4), path.candidates]
        agreed = 0
        while agreed < 4 and drafted[agreed] == view.greedy[agreed]:
            agreed += 1
        assert path.accepted == agreed >= 1
    assert view.paths[-1].accepted == max(path.accepted for path in view.paths)


def test_there_is_no_block_without_bpd_or_in_short_texts(decoder, results):
    assert most_improved_block(decoder, [results["greedy"]]) is None
    limited = dataclasses.replace(results["bpd"], method=parse_method("bpd:heads=2"))
    assert most_improved_block(decoder, [limited]) is None
    texts = [
        dataclasses.replace(g, output_ids=g.output_ids[:3], accepted=np.array([3]))
        for g in results["bpd"].generations
    ]  # shorter than a block of four
    short = dataclasses.replace(results["bpd"], generations=texts)
    assert most_improved_block(decoder, [short]) is None
