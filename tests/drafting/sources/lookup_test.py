import types

import jax
import numpy as np
import pytest

from bpd_jax.drafting.sources.lookup import PromptLookup


def drafts(texts, next_tokens, num_tokens, match, slots=None):
    """The drafts of some texts; empty where nothing matches."""
    slots = slots or max(map(len, texts)) + 1
    # Leftovers past the end must not matter.
    tokens = np.full((len(texts), slots), next_tokens[0], np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    drafter = PromptLookup(num_tokens, match)
    lengths, certain = np.array([list(map(len, texts)), next_tokens], np.int32)

    @jax.jit
    def propose(tokens, lengths, certain):
        view = types.SimpleNamespace(tokens=tokens, lengths=lengths, next_token=certain)
        seen, memory = drafter.look(view, None, None)
        assert memory is None
        return drafter.propose(seen, None)

    tree = jax.device_get(propose(tokens, lengths, certain))
    size = num_tokens + 1
    assert tree.size == drafter.max_nodes == drafter.max_depth == size
    assert tree.num_chains == drafter.max_drafts == 1
    drafted = []
    for row in range(len(texts)):
        assert tree.tokens[row, 0] == next_tokens[row]
        assert tree.parents[row].tolist() == list(range(-1, num_tokens))
        assert tree.depths[row].tolist() == list(range(size))
        assert tree.valid[row].tolist() in (
            [True] * size,
            [True] + [False] * num_tokens,
        )
        drafted.append(tree.tokens[row, 1 : tree.valid[row].sum()].tolist())
    return drafted


def naive(text, num_tokens, match):
    """The search that the docstring describes; the certain token ends the text."""
    for count in range(min(match, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, count - 1, -1):
            if text[end - count : end] == text[-count:]:
                draft = list(text)
                for _ in range(num_tokens):
                    draft.append(draft[end + len(draft) - len(text)])
                return draft[len(text) :]
    return []


@pytest.mark.parametrize(
    "text, next_token, match, draft",
    [
        ([1, 2, 9, 1], 2, 2, [9, 1, 2, 9, 1]),
        # Of two matches the later one counts.
        ([1, 2, 3, 1, 2, 4, 5, 1], 2, 2, [4, 5, 1, 2, 4]),
        # Unless the earlier one agrees in more tokens.
        ([7, 1, 2, 3, 1, 2, 4, 7, 1], 2, 3, [3, 1, 2, 4, 7]),
        ([1, 1], 1, 3, [1, 1, 1, 1, 1]),
        ([5], 5, 1, [5, 5, 5, 5, 5]),
        ([5], 6, 3, []),
    ],
)
def test_examples(text, next_token, match, draft):
    assert drafts([text], [next_token], 5, match, slots=12) == [draft]
    assert naive([*text, next_token], 5, match) == draft


@pytest.mark.parametrize("match", [1, 2, 4])
def test_drafts_equal_a_naive_search(match):
    rng = np.random.default_rng(match)
    texts = [
        rng.integers(0, vocab, length).tolist()
        for vocab in (2, 3, 9)
        for length in (1, 2, 3, 5, 9, 17, 24, 24)
    ]
    certain = rng.integers(0, 3, len(texts)).tolist()
    want = [naive([*t, c], 6, match) for t, c in zip(texts, certain, strict=True)]
    assert drafts(texts, certain, 6, match) == want
    assert [] in want
    assert sum(map(bool, want)) > 12
