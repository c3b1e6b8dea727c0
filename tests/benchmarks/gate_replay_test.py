"""The replay of the gate, on texts whose best choice is known."""

import numpy as np
import pytest

from benchmarks.gate_replay import speeds


@pytest.mark.parametrize(
    "tokens, price, always",
    [
        (4, 2.0, 2.0),  # Drafts pay, and all calls have them.
        (1, 1.5, 1 / 1.5),  # They never do.
    ],
)
def test_the_gate_is_at_most_a_little_worse_than_the_better_choice(
    tokens, price, always
):
    # The lengths differ, and the end of a text cuts the last call.
    texts = [("a", np.full(length, tokens)) for length in (40, 64, 90, 200)]
    row = speeds(texts, price)
    calls = sum(-(-len(text) // tokens) for _, text in texts)
    assert row["always"] == pytest.approx(394 / (price * calls))
    assert row["always"] == pytest.approx(always, rel=0.02)
    assert row["best_for_each_text"] == pytest.approx(max(row["always"], 1))
    assert 0.9 * row["best_for_each_text"] < row["gate"]
    assert row["gate"] <= row["best_for_each_text"] + 1e-6
    assert row["gate_by_prompts_file"] == {"a": pytest.approx(row["gate"])}
