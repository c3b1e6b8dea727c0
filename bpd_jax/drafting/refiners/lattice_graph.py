"""The histories of an n-gram model that the paths of a lattice reach, on the device.

The nodes at a position are the histories that end there: the empty one, those of one
candidate token, of two, ... of N-1. Each has a row that holds, for every candidate w of
the next position, log P(w | history) and the node that follows; where the history has
no n-gram for w, both come from the row of its longest suffix, with the weight of the
back-off added. The text before the lattice takes part as positions with one candidate.

All positions, rows of the batch and nodes of one length are worked on together. Of the
histories of two tokens there is one slot for each pair of candidates. Longer ones are
few among all that could be, because every suffix of an n-gram is an n-gram: `a b w` can
only be where `a b` has extensions and `b w` is. These are moved together into a fixed
number of slots; `overflow` tells where they were too few.

Numbers of the nodes at a position (W = 2, room for 3 trigrams):

    0        empty
    1, 2     candidates 0, 1
    3 ... 6  pairs of candidates 00 01 10 11
    7 ... 9  triples that are histories
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.ngrams.search.device import DeviceTable
from bpd_jax.typing import Array, Bool, Float, Int


@flax.struct.dataclass
class Columns:
    """Candidates as symbols; H positions of text, then those of the lattice.

    Attributes:
      predicted: the symbols when they are predicted.
      followed: the symbols when something follows them.
      valid: False where there is no candidate.
    """

    predicted: Int[Array, "B T W"]
    followed: Int[Array, "B T W"]
    valid: Bool[Array, "B T W"]


@flax.struct.dataclass
class Graph:
    """Rows of all M nodes at all positions but the last.

    Attributes:
      values: log P(w | history), natural logarithms.
      following: the node at the next position.
      states: the node of the longest history at each position, where there is only
        one candidate in each column up to it.
      candidates: the last candidate of each node's history; 0 for the empty one.
      overflow: which rows of the batch needed more slots than there were; they lack
        n-grams.
    """

    values: Float[Array, "B T-1 M W"]
    following: Int[Array, "B T-1 M W"]
    states: Int[Array, "B T"]
    candidates: Int[Array, "B T-1 M"]
    overflow: Bool[Array, " B"]


@flax.struct.dataclass
class _Level:
    """The histories of one length."""

    index: Int[Array, "B T C"]
    weight: Float[Array, "B T C"]
    extended: Bool[Array, "B T C"]
    exists: Bool[Array, "B T C"]
    suffix: Int[Array, "B T C"]
    candidate: Int[Array, "B T C"]

    def histories_only(self) -> "_Level":
        """An n-gram without extensions and weight predicts nothing of its own."""
        matters = self.extended | (self.weight != 0)
        return dataclasses.replace(self, exists=self.exists & matters)

    def moved(self, slots: "_Packed") -> "_Level":
        """Into fewer slots, and one position on: nothing ends at the first one."""
        packed = jax.tree.map(slots.select, self)
        packed = dataclasses.replace(packed, exists=packed.exists & slots.used)
        ends = ((0, 0), (1, 0), (0, 0))
        return jax.tree.map(lambda array: jnp.pad(array, ends), packed)


@flax.struct.dataclass
class _Rows:
    """Rows of the nodes so far; `own` tells which entries are n-grams of their own."""

    values: Float[Array, "B T-1 C W"]
    following: Int[Array, "B T-1 C W"]
    own: Bool[Array, "B T-1 C W"]

    def of(self, nodes: Int[Array, "B T-1 C"]) -> "_Rows":
        """The rows of some nodes."""
        # Whole rows, so that the gather copies stretches of memory.
        take = jax.vmap(jax.vmap(lambda rows, index: rows[index]))
        return jax.tree.map(lambda array: take(array, nodes), self)


@dataclasses.dataclass(frozen=True)
class Room:
    """Slots at each position for what is rare, and hence the memory of the search.

    Of B lattices of T positions (those of the text included) the rows take
    8 B T W (1 + W + W^2 + histories) bytes, the look-ups about 40 B T times the largest
    of the other two. Measured on lattices in which most neighbours are bigrams (W = 16,
    a 4-gram model of 5 million n-grams, `benchmarks.ngram_rescoring`): look-ups of
    trigrams at most 979, histories of three tokens 57, look-ups of 4-grams 152.

    Attributes:
      trigrams: look-ups of trigrams.
      histories: histories of three tokens, and likewise of each greater length.
      longer: look-ups of 4-grams, and likewise of each greater length.
    """

    trigrams: int
    histories: int
    longer: int

    @classmethod
    def for_width(cls, width: int) -> "Room":
        """Enough for nearly every lattice of W candidates."""
        square = width * width
        return cls(trigrams=6 * square, histories=max(square // 2, 1), longer=square)

    @classmethod
    def largest(cls, width: int) -> "Room":
        """Enough for every lattice of up to 16 candidates and a 5-gram model.

        Wider lattices and longer models would need more only where nearly every
        candidate may follow every other one; what finds no room backs off.
        """
        return cls(
            trigrams=min(width**3, 2**20),
            histories=min(width**4, 2**16),
            longer=min(width**5, 2**20),
        )


def build_graph(
    table: DeviceTable, columns: Columns, room: Room, *, every_candidate: bool = False
) -> Graph:
    """Makes the rows of all nodes.

    Args:
      table: the model; every candidate must have a unigram.
      columns: T positions; those of the text have one valid candidate, the first, or
        none before the beginning of the text.
      room: slots for the longer n-grams.
      every_candidate: keep a node for every candidate, also for those that are no
        history of the model, so that nodes but the empty one tell their last candidate.
    """
    width = columns.predicted.shape[-1]
    next_symbols, next_valid = columns.predicted[:, 1:], columns.valid[:, 1:]
    continues = next_valid & (columns.predicted == columns.followed)[:, 1:]

    level = _single_tokens(table, columns, every_candidate)
    nodes = [jnp.zeros_like(level.candidate[:, :-1, :1]), level.candidate[:, :-1]]
    states = jnp.where(level.exists[..., 0], 1, 0)
    root_values = table.take(table.log_probs[0], jnp.maximum(next_symbols, 0))
    slots = jnp.arange(1, width + 1, dtype=jnp.int32)
    after_root = jnp.where(level.exists, slots, 0)[:, 1:]
    rows = _Rows(
        values=root_values[:, :, None],
        following=after_root[:, :, None],
        own=next_valid[:, :, None],
    )
    overflow = jnp.zeros(next_valid.shape[:1], bool)
    for length in range(1, table.order):
        here = jax.tree.map(lambda array: array[:, :-1], level)
        base = rows.of(here.suffix)
        asks = base.own & (here.exists & here.extended)[..., None]
        asks &= next_valid[:, :, None]
        shape = asks.shape
        # Any two candidates may be a bigram; longer n-grams are rare.
        limits = {1: width * width, 2: room.trigrams}
        queries = _pack(asks.reshape(*shape[:2], -1), limits.get(length, room.longer))
        overflow |= queries.overflow
        asker, candidate = queries.source // width, queries.source % width
        parent = jnp.take_along_axis(here.index, asker, axis=2)
        symbol = jnp.take_along_axis(next_symbols, candidate, axis=2)
        child = table.find_child(length, jnp.where(queries.used, parent, -1), symbol)
        hit = child >= 0
        child = jnp.maximum(child, 0)
        found_values = table.take(table.log_probs[length], child)
        suffix = queries.select(base.following.reshape(*shape[:2], -1))
        after = suffix
        if length + 1 < table.order:
            found = _Level(
                index=child,
                weight=table.take(table.log_backoffs[length], child),
                extended=table.has_children(length + 1, child),
                exists=hit & jnp.take_along_axis(continues, candidate, axis=2),
                suffix=suffix,
                candidate=candidate,
            )
            found = found.histories_only()
            packed = _pack(
                found.exists, width * width if length == 1 else room.histories
            )
            overflow |= packed.overflow
            first = rows.values.shape[2] + here.index.shape[2]
            after = jnp.where(found.exists, first + packed.rank, suffix)
            # What was found at a position ends one position further.
            level = found.moved(packed)
            nodes.append(level.candidate[:, :-1])
            states = jnp.where(level.exists[..., 0], first, states)
        own, found_values, after = (
            queries.put_back(array).reshape(shape)
            for array in (hit, found_values, after)
        )
        own &= asks
        backed_off = here.weight[..., None] + base.values
        new = _Rows(
            values=jnp.where(own, found_values, backed_off),
            following=jnp.where(own, after, base.following),
            own=own,
        )
        rows = jax.tree.map(lambda *two: jnp.concatenate(two, axis=2), rows, new)
    candidates = jnp.concatenate(nodes, axis=2)[:, :, : rows.values.shape[2]]
    return Graph(rows.values, rows.following, states, candidates, overflow)


def _single_tokens(
    table: DeviceTable, columns: Columns, every_candidate: bool
) -> _Level:
    """The histories of one token."""
    index = jnp.maximum(columns.followed, 0)
    nothing = jnp.zeros(index.shape, jnp.int32)
    slots = jnp.arange(index.shape[-1], dtype=jnp.int32)
    slots = jnp.broadcast_to(slots, index.shape)
    if table.order == 1:
        no = jnp.zeros(index.shape, bool)
        return _Level(index, nothing.astype(jnp.float32), no, no, nothing, slots)
    level = _Level(
        index=index,
        weight=table.take(table.log_backoffs[0], index),
        extended=table.has_children(1, index),
        exists=columns.valid,
        suffix=nothing,
        candidate=slots,
    )
    return level if every_candidate else level.histories_only()


@flax.struct.dataclass
class _Packed:
    """The true ones among flags, moved together.

    Attributes:
      source: for every slot, the flag it stands for.
      used: which slots stand for a true flag.
      rank: for every flag, its slot if it is true.
      overflow: rows with more true flags than slots at some position.
    """

    source: Int[Array, "B T C"]
    used: Bool[Array, "B T C"]
    rank: Int[Array, "B T n"]
    overflow: Bool[Array, " B"]

    def select(self, values: Array) -> Array:
        """Values of the flags to values of the slots."""
        if values.shape == self.source.shape:
            return values
        return jnp.take_along_axis(values, self.source, axis=2)

    def put_back(self, values: Array) -> Array:
        """Values of the slots to values of the flags; those of false flags differ."""
        if values.shape == self.rank.shape:
            return values
        return jnp.take_along_axis(values, self.rank, axis=2)


def _pack(flags: Bool[Array, "B T n"], room: int) -> _Packed:
    """Moves flags together if they are more than there is room for."""
    size = flags.shape[-1]
    every = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), flags.shape)
    if size <= room:
        return _Packed(every, flags, every, jnp.zeros(flags.shape[:1], bool))
    rank = jnp.cumsum(flags, axis=-1, dtype=jnp.int32) - 1
    number = rank[..., -1] + 1

    def scatter(targets: Int[Array, " n"], flags: Int[Array, " n"]) -> Int[Array, " C"]:
        return jnp.zeros(room, jnp.int32).at[targets].set(flags, mode="drop")

    target = jnp.where(flags, rank, room)
    return _Packed(
        source=jax.vmap(jax.vmap(scatter))(target, every),
        used=jnp.arange(room) < number[..., None],
        rank=jnp.clip(rank, 0, room - 1),
        overflow=(number > room).any(axis=1),
    )
