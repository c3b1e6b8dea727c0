import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.ngrams import parallel, trie

# The worked example of the module: V = 3, sentences `0 1` and `0`.
WIDTH = 5
KEYS = (np.array([0, 1, 3, 4]), np.array([1, 3, 8, 15]))


def keys_of(grams):
    keys, index_of = [], {(): 0}
    for order in range(1, max(map(len, grams)) + 1):
        level = sorted(gram for gram in grams if len(gram) == order)
        values = [index_of[gram[:-1]] * WIDTH + gram[-1] for gram in level]
        keys.append(np.array(values, np.int64))
        index_of = {gram: index for index, gram in enumerate(level)}
    return tuple(keys)


# Closed under prefixes, but not under suffixes.
GRAMS = st.lists(
    st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=4), min_size=1, max_size=60
).map(lambda rows: {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


@given(GRAMS)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_suffix_links_and_offsets_match_their_definition(grams):
    keys = keys_of(grams)
    links = trie.suffix_links(keys, WIDTH)
    shorter = [()]
    for order, level_links in enumerate(links, start=1):
        level = sorted(gram for gram in grams if len(gram) == order)
        index_of = {gram: index for index, gram in enumerate(shorter)}
        assert level_links.tolist() == [index_of.get(gram[1:], -1) for gram in level]
        assert trie.ngrams(keys, order, WIDTH).tolist() == [list(g) for g in level]
        offsets = trie.child_offsets(keys, order - 1, WIDTH)
        prefixes = [gram[:-1] for gram in level]
        for gram, index in index_of.items():
            count = offsets[index + 1] - offsets[index]
            assert count == prefixes.count(gram)
            assert not count or offsets[index] == prefixes.index(gram)
        shorter = level
    assert not trie.child_offsets(keys, len(keys), WIDTH).any()


@given(GRAMS)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_find_with_offsets_gives_the_same_indices(grams):
    keys = keys_of(grams)
    for order, level in enumerate(keys):
        offsets = trie.child_offsets(keys, order, WIDTH)
        parents = np.arange(-1, offsets.size - 1)[:, None]
        symbols = np.arange(-1, WIDTH)
        expected = trie.find(level, parents, symbols, WIDTH)
        indices = trie.find(level, parents, symbols, WIDTH, offsets)
        np.testing.assert_array_equal(indices, expected)
        assert (indices >= 0).sum() == level.size


def test_find_returns_the_index_or_minus_one():
    parents = np.array([0, 0, 1, 3, -1, 0])
    symbols = np.array([1, 2, 3, 0, 1, -1])
    indices = trie.find(KEYS[1], parents, symbols, WIDTH)
    assert indices.tolist() == [0, -1, 2, 3, -1, -1]
    # Key 4 is symbol 4 after parent 0, and not symbol -1 after parent 1.
    assert trie.find(np.array([4]), np.array([1]), np.array([-1]), WIDTH) == [-1]
    assert trie.find(np.zeros(0, int), np.array([0]), np.array([1]), WIDTH) == [-1]


def test_galloping_and_binary_search_give_the_same_links():
    # After 0 every second symbol was seen, and after `0 0` two of these, so that few
    # keys are searched in many; after `1 0` all of these were seen.
    width = 4002
    first = np.arange(width - 2)
    second = np.concatenate([np.arange(0, 4000, 2), [width]])
    third = np.concatenate(
        [[1998, 3998], (second.size - 1) * width + np.arange(0, 4000, 2)]
    )
    links = trie.suffix_links((first, second, third), width)[2]
    assert links.tolist() == [999, 1999, *range(2000)]


def test_threads_divide_the_parents(monkeypatch):
    monkeypatch.setattr(trie, "_THREAD_SIZE", 10)
    monkeypatch.setattr(parallel, "cores", lambda: 3)
    offsets = np.cumsum([0, 0, 50, 1, 1, 1, 0, 90, 3, 0])
    ranges = []
    trie.in_threads(offsets, lambda *part: ranges.append(part))
    assert len(ranges) > 1
    assert sorted(p for begin, end in ranges for p in range(begin, end)) == [*range(9)]
