"""The n-gram histories that the paths of a lattice reach, computed on the device.

The nodes at a position are the histories that end there, of 0 to N-1 candidate tokens.
The row of a node contains, for every candidate w of the next position, log P(w |
history) and the next node. If the history has no n-gram with w, both are taken from the
row of its longest suffix, and the back-off weight is added. The text before the lattice
is part of the graph, as positions with one candidate.

All positions, rows of the batch and nodes of one length are processed together. There
is one slot for each pair of candidates, a history of two tokens. Of the possible longer
histories few exist, because every suffix of an n-gram is an n-gram: `a b w` requires
that `a b` has extensions and that `b w` exists. They are packed into a fixed number of
slots; `overflow` marks rows for which the slots did not suffice.

Indices of the nodes at a position (W = 2, room for 3 trigrams):

    0        empty
    1, 2     candidates 0, 1
    3 ... 6  pairs of candidates 00 01 10 11
    7 ... 9  triples that are histories
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.ngrams.search.device_table import DeviceTable, take


@flax.struct.dataclass
class Columns:
    """Candidates as symbols, at H positions of text and those of the lattice.

    Attributes:
      predicted: symbols of the candidates as predictions.
      followed: symbols of the candidates as part of a history.
      valid: False where there is no candidate.
    """

    predicted: Int[Array, "B T W"]
    followed: Int[Array, "B T W"]
    valid: Bool[Array, "B T W"]


@flax.struct.dataclass
class Graph:
    """The rows of all M nodes at all positions but the last.

    Attributes:
      values: log P(w | history), in nats.
      following: the node at the next position.
      states: the node of the longest history at each position, defined if each column
        up to it has only one candidate.
      candidates: the last candidate of each node's history; 0 for the empty history.
      overflow: rows of the batch that needed more slots than there are, and therefore
        lack n-grams.
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
        """Drops n-grams without extensions and back-off weight.

        As histories they predict the same as their suffixes.
        """
        matters = self.extended | (self.weight != 0)
        return dataclasses.replace(self, exists=self.exists & matters)

    def moved(self, slots: "_Packed") -> "_Level":
        """Packs the level into slots and shifts it by one position."""
        packed = jax.tree.map(slots.select, self)
        packed = dataclasses.replace(packed, exists=packed.exists & slots.used)
        ends = ((0, 0), (1, 0), (0, 0))
        return jax.tree.map(lambda array: jnp.pad(array, ends), packed)


@flax.struct.dataclass
class _TransitionRows:
    """The rows of the nodes so far; `listed` marks n-grams that the model has."""

    values: Float[Array, "B T-1 C W"]
    following: Int[Array, "B T-1 C W"]
    listed: Bool[Array, "B T-1 C W"]

    def of(self, nodes: Int[Array, "B T-1 C"]) -> "_TransitionRows":
        """The rows of the given nodes."""
        # Whole rows, so that the gather copies contiguous memory.
        select = jax.vmap(jax.vmap(lambda rows, index: rows[index]))
        return jax.tree.map(lambda array: select(array, nodes), self)


@dataclasses.dataclass(frozen=True)
class Room:
    """Numbers of slots at each position, which determine the memory of the search.

    For B lattices of T positions (those of the text included) the rows take
    8 B T W (1 + W + W^2 + histories) bytes, the look-ups about 40 B T times the larger
    of the other two. Highest numbers measured on lattices in which most neighbours are
    bigrams (W = 16, a 4-gram model of 5 million n-grams, `benchmarks.ngram_rescoring`):
    979 look-ups of trigrams, 57 histories of three tokens, 152 look-ups of 4-grams.

    Attributes:
      trigrams: look-ups of trigrams.
      histories: histories of three tokens, and of each greater length.
      longer: look-ups of 4-grams, and of each greater length.
    """

    trigrams: int
    histories: int
    longer: int

    @classmethod
    def for_width(cls, width: int) -> "Room":
        """Slots that suffice for nearly every lattice of W candidates."""
        square = width * width
        return cls(trigrams=6 * square, histories=max(square // 2, 1), longer=square)

    @classmethod
    def largest(cls, width: int) -> "Room":
        """Slots that suffice for every lattice of up to 16 candidates and 5-grams.

        Wider lattices and longer n-grams need more only if nearly every candidate can
        follow every other one; n-grams without a slot back off.
        """
        return cls(
            trigrams=min(width**3, 2**20),
            histories=min(width**4, 2**16),
            longer=min(width**5, 2**20),
        )


def build_graph(
    table: DeviceTable, columns: Columns, room: Room, *, every_candidate: bool = False
) -> Graph:
    """Computes the rows of all nodes.

    Args:
      table: the model; every candidate must have a unigram.
      columns: T positions; those of the text have one valid candidate, the first, or
        none before the beginning of the text.
      room: slots for the longer n-grams.
      every_candidate: whether every candidate has a node, even if it is not a history
        of the model, so that all nodes but the empty one determine their last
        candidate.
    """
    width = columns.predicted.shape[-1]
    next_symbols, next_valid = columns.predicted[:, 1:], columns.valid[:, 1:]
    continues = next_valid & (columns.predicted == columns.followed)[:, 1:]

    level = _single_tokens(table, columns, every_candidate)
    nodes = [jnp.zeros_like(level.candidate[:, :-1, :1]), level.candidate[:, :-1]]
    states = jnp.where(level.exists[..., 0], 1, 0)
    root_values = take(table.log_probs[0], jnp.maximum(next_symbols, 0))
    slots = jnp.arange(1, width + 1, dtype=jnp.int32)
    after_root = jnp.where(level.exists, slots, 0)[:, 1:]
    rows = _TransitionRows(
        values=root_values[:, :, None],
        following=after_root[:, :, None],
        listed=next_valid[:, :, None],
    )
    overflow = jnp.zeros(next_valid.shape[:1], bool)
    for length in range(1, table.order):
        here = jax.tree.map(lambda array: array[:, :-1], level)
        base = rows.of(here.suffix)
        queried = base.listed & (here.exists & here.extended)[..., None]
        queried &= next_valid[:, :, None]
        shape = queried.shape
        # Any two candidates may be a bigram; longer n-grams are rare.
        limits = {1: width * width, 2: room.trigrams}
        flags = queried.reshape(*shape[:2], -1)
        queries = _pack(flags, limits.get(length, room.longer))
        overflow |= queries.overflow
        node, candidate = queries.source // width, queries.source % width
        parent = jnp.take_along_axis(here.index, node, axis=2)
        symbol = jnp.take_along_axis(next_symbols, candidate, axis=2)
        child = table.find_child(length, jnp.where(queries.used, parent, -1), symbol)
        hit = child >= 0
        child = jnp.maximum(child, 0)
        child_values = take(table.log_probs[length], child)
        suffix = queries.select(base.following.reshape(*shape[:2], -1))
        after = suffix
        if length + 1 < table.order:
            children = _Level(
                index=child,
                weight=take(table.log_backoffs[length], child),
                extended=table.has_children(length + 1, child),
                exists=hit & jnp.take_along_axis(continues, candidate, axis=2),
                suffix=suffix,
                candidate=candidate,
            )
            children = children.histories_only()
            packed = _pack(
                children.exists, width * width if length == 1 else room.histories
            )
            overflow |= packed.overflow
            first = rows.values.shape[2] + here.index.shape[2]
            after = jnp.where(children.exists, first + packed.rank, suffix)
            # The extension of a history at a position ends at the next position.
            level = children.moved(packed)
            nodes.append(level.candidate[:, :-1])
            states = jnp.where(level.exists[..., 0], first, states)
        listed, child_values, after = (
            queries.put_back(array).reshape(shape)
            for array in (hit, child_values, after)
        )
        listed &= queried
        backed_off = here.weight[..., None] + base.values
        new = _TransitionRows(
            values=jnp.where(listed, child_values, backed_off),
            following=jnp.where(listed, after, base.following),
            listed=listed,
        )
        rows = jax.tree.map(lambda *two: jnp.concatenate(two, axis=2), rows, new)
    candidates = jnp.concatenate(nodes, axis=2)[:, :, : rows.values.shape[2]]
    return Graph(rows.values, rows.following, states, candidates, overflow)


def _single_tokens(
    table: DeviceTable, columns: Columns, every_candidate: bool
) -> _Level:
    """The histories of one token."""
    index = jnp.maximum(columns.followed, 0)
    zero = jnp.zeros(index.shape, jnp.int32)
    slots = zero + jnp.arange(index.shape[-1], dtype=jnp.int32)
    if table.order == 1:
        none = jnp.zeros(index.shape, bool)
        return _Level(index, zero.astype(jnp.float32), none, none, zero, slots)
    level = _Level(
        index=index,
        weight=take(table.log_backoffs[0], index),
        extended=table.has_children(1, index),
        exists=columns.valid,
        suffix=zero,
        candidate=slots,
    )
    return level if every_candidate else level.histories_only()


@flax.struct.dataclass
class _Packed:
    """The true flags, packed into slots.

    Attributes:
      source: the index of the flag of each slot.
      used: whether the flag of each slot is true.
      rank: the slot of each true flag; arbitrary for other flags.
      overflow: rows with more true flags than slots at some position.
    """

    source: Int[Array, "B T C"]
    used: Bool[Array, "B T C"]
    rank: Int[Array, "B T n"]
    overflow: Bool[Array, " B"]

    def select(self, values: Array) -> Array:
        """Maps values of the flags to values of the slots."""
        if values.shape == self.source.shape:
            return values
        return jnp.take_along_axis(values, self.source, axis=2)

    def put_back(self, values: Array) -> Array:
        """Maps values of slots to values of flags; arbitrary for false flags."""
        if values.shape == self.rank.shape:
            return values
        return jnp.take_along_axis(values, self.rank, axis=2)


def _pack(flags: Bool[Array, "B T n"], room: int) -> _Packed:
    """Packs the true flags into `room` slots, if there are more flags than slots."""
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
