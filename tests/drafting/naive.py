"""Small models, random lattices, and naive searches."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.drafting.interface import Prompts, View
from bpd_jax.drafting.lattice import Lattice, build_lattice
from bpd_jax.drafting.searches.beam_search import BeamSearch
from bpd_jax.drafting.searches.static import StaticTree, Topology
from bpd_jax.drafting.searches.tree import BestFirst
from bpd_jax.models.model import Model
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel
from tests.decoding import random_models

VOCAB, END = 8, 0


@functools.cache
def ngram_model(order: int, end_of_text: int | None = END, seed: int = 0) -> NGramModel:
    """A model of a given order over eight tokens; token 0 ends a text."""
    rng = np.random.default_rng(order + 100 * seed)
    # Tokens 6 and 7 are never seen.
    texts = [rng.zipf(1.6, size=30).clip(1, VOCAB - 3) for _ in range(20)]
    counts = count_ngrams(
        [text.astype(np.int32) for text in texts],
        order=order,
        vocab_size=VOCAB,
        end_of_text=end_of_text,
    )
    return estimate_katz(counts)


def random_lattice(
    seed: int, batch: int = 2, length: int = 4, width: int = 3
) -> Lattice:
    """A lattice of distinct candidates; the first position is certain."""
    rng = np.random.default_rng(seed)
    tokens = np.stack(
        [[rng.permutation(VOCAB)[:width] for _ in range(length)] for _ in range(batch)]
    )
    tokens[:, 0] = tokens[:, 0, :1]
    log_probs = -np.sort(rng.exponential(2, size=(batch, length, width)))
    log_probs[:, 0] = [0] + [-np.inf] * (width - 1)
    return Lattice(
        tokens.astype(np.int32),
        log_probs.astype(np.float32),
        np.zeros((batch, length), np.float32),
    )


@flax.struct.dataclass
class FixedHeads:
    """In place of a model: the candidates of a lattice, whatever the text."""

    candidates: tuple[np.ndarray, ...]

    def block_candidates(self, *_):
        return self.candidates


def random_view(lattice: Lattice, seed: int = 0, slots: int = 20) -> View:
    """A view of a lattice after random texts of different lengths."""
    rng = np.random.default_rng(seed)
    batch = len(lattice.tokens)
    arrays = lattice.tokens, lattice.log_probs, lattice.entropies
    heads = FixedHeads(tuple(array[:, 1:] for array in arrays))
    return View(
        tokens=jnp.asarray(rng.integers(0, VOCAB, (batch, slots)), jnp.int32),
        lengths=jnp.asarray([slots - 5, 1, 7, 3][:batch], jnp.int32),
        next_token=jnp.asarray(lattice.tokens[:, 0, 0]),
        hidden=jnp.zeros((batch, 1)),
        keys=jax.random.split(jax.random.key(seed), batch),
        model=heads,
    )


def naive_steps(
    text: list[int],
    lattice: Lattice,
    row: int,
    model: NGramModel | None = None,
    alpha: float = 1.0,
    slope: float = 0.0,
    *,
    adaptive: bool = False,
) -> Callable[[tuple[int, ...]], np.ndarray]:
    """The definition: scores of the candidates after a path, n-gram model included.

    The text ends with the certain token.
    """
    tokens = np.asarray(lattice.tokens[row])
    known = model.with_finite_scores() if model else None

    def log_prob(history: list[int], token: int) -> float:
        value = known.log_prob(history, token)
        total = text[:-1].count(history[-1])
        if not adaptive or total == 0:
            return value
        pairs = list(itertools.pairwise(text)).count((history[-1], token))
        # (1 - λ) p + λ pairs / total with λ = total / (total + 1), as a logarithm.
        seen = np.log(pairs) if pairs else -np.inf
        return float(np.logaddexp(value, seen) - np.log(total + 1))

    @functools.cache
    def steps(picks: tuple[int, ...]) -> np.ndarray:
        """Scores of the candidates that may follow `picks`."""
        position = len(picks) + 1
        path = [int(tokens[j + 1, pick]) for j, pick in enumerate(picks)]
        scores = np.asarray(lattice.log_probs[row, position], np.float64)
        if known is None:
            return scores
        weight = max(0.0, alpha + slope * float(lattice.entropies[row, position]))
        return scores + weight * np.array(
            [log_prob(text + path, int(token)) for token in tokens[position]]
        )

    return steps


def prefixes(tree, row):
    """Every prefix of the valid nodes with its best rank, in order of appearance."""
    tree, ranks = jax.device_get(tree), {}
    for node in np.flatnonzero(tree.valid[row]):
        rank, prefix = int(tree.ranks[row, node]), path_to(tree, row, node)
        ranks[prefix] = min(rank, ranks.get(prefix, rank))
    return ranks


def path_tokens(lattice: Lattice, row: int, picks: tuple[int, ...]) -> tuple[int, ...]:
    """The certain token and the picked candidates."""
    tokens = lattice.tokens[row]
    return int(tokens[0, 0]), *(int(tokens[j + 1, w]) for j, w in enumerate(picks))


def all_paths(steps, lattice: Lattice, row: int) -> dict[tuple[int, ...], float]:
    """The score of every possible path; of equal paths the better one."""
    length, width = lattice.tokens.shape[1:]
    scores: dict[tuple[int, ...], float] = {}
    for picks in itertools.product(range(width), repeat=length - 1):
        score = sum(float(steps(picks[:j])[pick]) for j, pick in enumerate(picks))
        path = path_tokens(lattice, row, picks)
        scores[path] = max(score, scores.get(path, -np.inf))
    return {path: score for path, score in scores.items() if score > -np.inf}


def assert_best(drafts: np.ndarray, paths: dict[tuple[int, ...], float], count: int):
    """Checks that drafts are the `count` best paths, in order; ties in any order."""
    drafted = [tuple(draft) for draft in drafts.tolist()]
    assert len(set(drafted)) == len(drafted)
    best = sorted(paths.values(), reverse=True)[:count]
    draft_scores = [paths[draft] for draft in drafted]
    np.testing.assert_allclose(draft_scores, best, rtol=1e-5, atol=1e-4)


TOKENS, LENGTH, WIDTH = 13, 4, 3
TOPOLOGY = Topology.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)])
NODES = 9


@functools.cache
def make_model(seed: int, block_size: int = 1, num_layers: int = 1) -> Model:
    """A small transformer of 13 tokens."""
    return random_models.make_model(seed, block_size, TOKENS, num_layers=num_layers)


def slow_read(model: Model, text) -> np.ndarray:
    """log p of the next token `[V]`, by one pass over the whole text."""
    tokens = np.zeros((1, 48), np.int32)
    tokens[0, : len(text)] = text
    logits = random_models.read_texts(model, tokens)[0]
    return np.asarray(jax.nn.log_softmax(logits[0, len(text) - 1]))


def slow_values(model: Model, text) -> np.ndarray:
    """A text's values `[layer, K, T, H]`, by one pass over all of it."""
    tokens = np.zeros((1, 48), np.int32)
    tokens[0, : len(text)] = text
    values = random_models.read_texts(model, tokens)[2].values[:, 0]
    return np.asarray(values).swapaxes(1, 2)[:, :, : len(text)]


def make_view(model: Model, lengths=(5, 2, 9), slots=32, seed=0) -> View:
    """Rows of random text; tokens past their ends must not matter."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    return View(
        tokens=jnp.asarray(rng.integers(0, TOKENS, (batch, slots)), jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        next_token=jnp.asarray(rng.integers(0, TOKENS, batch), jnp.int32),
        hidden=jnp.asarray(rng.normal(size=(batch, 16)), jnp.float32),
        keys=jax.random.split(jax.random.key(0), batch),
        model=model,
    )


def lattice_of(view: View) -> Lattice:
    """The lattice of the heads, as numpy arrays."""
    candidates = view.model.block_candidates(view.hidden, LENGTH, WIDTH)
    return jax.device_get(build_lattice(view.next_token, *candidates))


def whole_text(view: View, row: int) -> list[int]:
    """The text and the certain token."""
    # With numpy: jax would compile a slice for every length.
    text = np.asarray(view.tokens)[row, : np.asarray(view.lengths)[row]].tolist()
    return [*text, int(np.asarray(view.next_token)[row])]


def _normalised(scores):
    return scores - np.logaddexp.reduce(scores)


def _naive_prefixes(offer, row):
    """Summed scores of every prefix: plain ones, and normalised after each path."""
    plain, normal, ranked = {(): 0.0}, {(): 0.0}, {}
    frontier = [()]
    for _ in range(1, LENGTH):
        longer = []
        for path in frontier:
            tokens, scores = offer(row, path)
            ranked[path] = [int(tokens[i]) for i in np.argsort(-scores)]
            steps = zip(tokens, scores, _normalised(scores), strict=True)
            for token, score, share in steps:
                new = (*path, int(token))
                plain[new] = plain[path] + score
                normal[new] = normal[path] + share
                longer.append(new)
        frontier = longer
    return plain, normal, ranked


def _naive_beam(plain, beam):
    kept = [()]
    for level in range(1, LENGTH):
        longer = [path for path in plain if len(path) == level and path[:-1] in kept]
        kept = sorted(longer, key=lambda path: -plain[path])[:beam]
    return kept


def _naive_tree(ranked):
    tokens = {(): ()}
    for node in TOPOLOGY.choices:
        path = tokens[node[:-1]]
        tokens[node] = (*path, ranked[path][node[-1]])
    return [path[-1] for path in tokens.values() if path]


@functools.partial(jax.jit, static_argnames=("paths", "searches"))
def _grow(paths, searches, arrays, fields, keys=None):
    view = View(**fields)
    memory = paths.remember(arrays, Prompts(view.tokens, view.lengths, None, None))
    state, _ = paths.start(view, arrays, memory)
    return [
        search.grow(paths, arrays, state, view.next_token, keys) for search in searches
    ]


def grow_drafts(paths, view: View, *searches, keys=None):
    """The drafts of some searches, from a fresh memory, as numpy arrays."""
    fields = {
        field.name: getattr(view, field.name) for field in dataclasses.fields(view)
    }
    return jax.device_get(_grow(paths, searches, paths.arrays, fields, keys))


def check_every_search(paths, view: View, offer) -> None:
    """Checks every search against a naive one over `offer`.

    Args:
      paths: the path model.
      view: what it sees.
      offer: returns the candidates after a path of a row, and their scores.
    """
    assert (paths.block_size, paths.width) == (LENGTH, WIDTH)
    searches = BeamSearch(1), BeamSearch(3), StaticTree(TOPOLOGY), BestFirst(NODES)
    greedy, beam, static, best = grow_drafts(paths, view, *searches)
    for row, first in enumerate(view.next_token.tolist()):
        plain, normal, ranked = _naive_prefixes(offer, row)
        assert greedy.tokens[row].tolist() == [first, *_naive_beam(plain, 1)[0]]
        chains = [[first, *path] for path in _naive_beam(plain, 3)]
        assert beam.tokens[row].reshape(3, LENGTH).tolist() == chains
        assert static.tokens[row].tolist() == [first, *_naive_tree(ranked)]
        want = [(), *TOPOLOGY.choices]
        parents = [want.index(node[:-1]) for node in TOPOLOGY.choices]
        assert static.parents[row].tolist() == [-1, *parents]
        assert static.depths[row].tolist() == [*map(len, want)]
        want = sorted(normal, key=lambda path: -normal[path])[:NODES]
        nodes = np.argsort(best.ranks[row])
        assert [path_to(best, row, node)[1:] for node in nodes] == want
        assert static.valid[row].all()
        assert best.valid[row].all()


def path_to(tree, row, node) -> tuple[int, ...]:
    """The tokens of a tree from a root to a node."""
    path = []
    while node >= 0:
        path.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tuple(path[::-1])
