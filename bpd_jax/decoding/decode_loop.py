"""The decode loop: propose → verify → accept → commit, for every method.

One iteration makes one serial call of the model. Methods that run on the device decode
in a single `lax.while_loop`. For methods that propose on the host, the two halves of an
iteration are jitted separately, with the host step between them.

What is here:

- prompts are run once, by a program that all methods share;
- a batch of texts, each with its own length, limit and random numbers; finished rows
  stay as they are;
- end tokens, limits and stop texts, inside a draft too;
- a stride: at most so many tokens of a draft are kept, as studies need it;
- a history of drafts, counts and entropies of every call, for studies.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import Array, Float, Int, Num, PyTree
from bpd_jax.decoding.acceptance import next_tokens, unchanged
from bpd_jax.decoding.decode_state import (
    DecodeState,
    History,
    StopTable,
    empty_history,
    spread,
)
from bpd_jax.decoding.options import StepOptions
from bpd_jax.decoding.sampling import (
    DRAFTS,
    adjusted,
    common_noise,
    row_keys,
    stream_keys,
)
from bpd_jax.decoding.verification import verify
from bpd_jax.drafting.draft_tree import DraftTree, take
from bpd_jax.drafting.interface import Drafter, Outcome, Prompts, View, without_arrays
from bpd_jax.models.cache import KeyValues, commit, write_rows
from bpd_jax.models.decoded_model import DecodedModel
from bpd_jax.models.partitioning import from_own_rows, on_host, own_rows
from bpd_jax.models.programs import Program
from bpd_jax.models.segment_attention import Segments


@flax.struct.dataclass
class Weights:
    """The constant arrays of decoding.

    Attributes:
      drafter: `arrays` of the drafter.
      stops: the automaton of the stop texts, or None.
    """

    drafter: PyTree = None
    stops: StopTable | None = None


def prefill(
    model: DecodedModel,
    weights: Weights,
    drafter: Drafter,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    limits: Int[Array, " B"],
    keys: tuple[int | np.integer, Int[Array, " B"]],
    reference: Int[Array, "B S"] | None = None,
    *,
    options: StepOptions,
    max_calls: int,
    record: bool = True,
    read: int | None = None,
) -> DecodeState:
    """Runs the prompts and returns the state before the first serial call.

    Args:
      lengths: lengths of the prompts, at least 1.
      limits: the text length at which each row stops; at most `max_calls` more than
        the longest prompt.
      keys: the arguments of `row_keys`.
      max_calls: number of columns of the history.
      read: columns of `prompts` that the model runs, at least the longest of `lengths`;
        None for all.
    """
    outputs = run_prompts(model, drafter.feature_layers, prompts, read)
    rows = (prompts, lengths, limits, keys, reference)
    static = without_arrays(drafter)
    return _first_state(
        model, weights, static, rows, outputs, options, max_calls, record
    )


@functools.partial(
    Program, static=("layers", "read"), constants=("model",), in_order=True
)
def run_prompts(
    model: DecodedModel,
    layers: tuple[int, ...],
    prompts: Int[Array, "B T"],
    read: int | None,
) -> tuple[Num[Array, "B T D"], KeyValues, Float[Array, "B T F"]]:
    """The forward pass over the prompts, compiled once for all methods.

    The outputs of columns that are not read are zeros.
    """
    padded = prompts.shape[1]
    prompts = prompts[:, :read]
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    hidden, new, features = model.forward(prompts, positions, Segments(), layers=layers)

    def pad(array: Array, axis: int) -> Array:
        ends = [(0, 0)] * array.ndim
        ends[axis] = (0, padded - prompts.shape[1])
        return jnp.pad(array, ends)

    # One program of `_first_state` for prompts that are read in part or as a whole.
    new = KeyValues(pad(new.keys, 2), pad(new.values, 2))
    return pad(hidden, 1), new, pad(features, 1)


@functools.partial(
    Program,
    static=("drafter", "options", "max_calls", "record"),
    constants=("model", "weights"),
)
def _first_state(
    model: DecodedModel,
    weights: Weights,
    drafter: Drafter,
    rows: tuple[Array, Array, Array, tuple[Any, Array], Array | None],
    outputs: tuple[Array, KeyValues, Array],
    options: StepOptions,
    max_calls: int,
    record: bool,
) -> DecodeState:
    """The state after the outputs of `run_prompts`; for `rows` see `prefill`."""
    prompts, lengths, limits, numbers, reference = rows
    keys = row_keys(*numbers)
    hidden, new, features = outputs
    batch, padded = prompts.shape
    # ---- Room for the text and a last block: `commit` writes whole blocks ----
    slots = padded + max_calls + drafter.max_depth
    last = _at(hidden, lengths - 1)
    tokens = jnp.zeros((batch, slots), jnp.int32).at[:, :padded].set(prompts)

    # ---- The certain token: the model's own choice after the prompt ----
    def adjust(logits: Array) -> Array:
        return adjusted(logits, tokens[:, None], lengths[:, None], lengths, options)

    state = DecodeState(
        tokens=tokens,
        starts=lengths,
        limits=limits,
        cache=commit(model.empty_cache(batch, slots), new, lengths),
        hidden=last,
        next_token=next_tokens(
            model,
            last[:, None],
            lengths[:, None],
            keys,
            options,
            adjust if options.adjusts else unchanged,
        )[:, 0],
        keys=keys,
        done=lengths >= limits,
        calls=jnp.zeros((batch,), jnp.int32),
        stop_states=jnp.zeros((batch,), jnp.int32),
        memory=drafter.start(
            weights.drafter, Prompts(tokens, lengths, features, hidden, reference)
        ),
        history=empty_history(max_calls, batch, drafter.max_depth) if record else None,
    )
    return spread(state, model.mesh)


def look(
    model: DecodedModel,
    weights: Weights,
    drafter: Drafter,
    state: DecodeState,
    options: StepOptions,
) -> tuple[PyTree, PyTree, Float[Array, "B L"] | None]:
    """First half of an iteration: `Drafter.look`.

    Returns:
      The argument of `Drafter.propose`, the memory of the drafter, and the entropies
      of the heads for the history.
    """
    view = View(
        tokens=state.tokens,
        lengths=state.lengths,
        next_token=state.next_token,
        hidden=state.hidden,
        keys=stream_keys(state.keys, state.lengths, DRAFTS),
        model=model,
        noise=common_noise(model, state.keys, state.lengths, options),
    )
    seen, memory = drafter.look(view, weights.drafter, state.memory)
    return seen, memory, drafter.entropies(seen)


def serial_call(
    model: DecodedModel,
    weights: Weights,
    drafter: Drafter,
    state: DecodeState,
    tree: DraftTree,
    entropies: Float[Array, "B L"] | None,
    options: StepOptions,
) -> DecodeState:
    """Second half of an iteration: one forward pass over the drafts and its outcome.

    Worked example (greedy text `a b c e …`, state before `a`, draft `a b x d`): `a` is
    the certain token; the model predicts `b` after `a` and `c` after `b`, so `x` is
    rejected. Two tokens are committed, and `c` is the next certain token.
    """
    # ---- Verify: one forward pass over all nodes of the drafts, with a tree mask ----
    verified = verify(
        model,
        state.cache,
        tree,
        state.next_token,
        state.keys,
        drafter,
        options,
        state.tokens,
        state.starts,
    )
    # ---- Accept: the longest path that the model agrees with ----
    tree, accepted = verified.tree, verified.accepted
    tokens = take(tree.tokens, accepted.path)
    count, ended, stop_states = _stop(weights, state, tokens, accepted.count, options)
    emitted = count
    # Draft tokens after the end of the text are neither accepted nor rejected.
    beyond = ended[:, None] & (jnp.arange(tokens.shape[1]) >= count[:, None])
    # The history has all accepted tokens; the text continues after the stride.
    if options.stride is not None:
        count, ended, stop_states = _stop(
            weights, state, tokens, jnp.minimum(count, options.stride), options
        )
    last = jnp.maximum(count, 1) - 1
    done = state.done  # The count of these rows is 0.

    def unless_done(new: Array, old: Array) -> Array:
        return jnp.where(done.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    # ---- Learn: what the drafter remembers of the call ----
    outcome = Outcome(tree, verified.choices, count, verified.features, verified.hidden)
    memory = drafter.learn(weights.drafter, state.memory, outcome)
    # ---- Commit: tokens, their keys and values, and the next certain token ----
    return dataclasses.replace(
        state,
        tokens=write_rows(state.tokens, tokens, state.lengths),
        cache=commit(state.cache, verified.new, count),
        hidden=unless_done(_at(verified.hidden, last), state.hidden),
        next_token=unless_done(_at(accepted.following, last), state.next_token),
        done=done | ended,
        calls=state.calls + ~done,
        stop_states=unless_done(stop_states, state.stop_states),
        memory=memory,
        history=_record(
            state.history,
            state,
            tree,
            proposed=_first_path(tree, drafter.max_depth),
            draft=jnp.where((accepted.path < 0) | beyond, -1, tokens),
            count=emitted,
            rank=accepted.rank,
            entropies=entropies,
        ),
    )


def _stop(
    weights: Weights,
    state: DecodeState,
    tokens: Int[Array, "B L"],
    count: Int[Array, " B"],
    options: StepOptions,
) -> tuple[Array, Array, Array]:
    """Truncates accepted tokens at the limit, end tokens and stop texts.

    Returns:
      The number of emitted tokens, whether each row ends, and states of `StopTable`.
    """
    length = tokens.shape[1]
    count = jnp.minimum(count, state.limits - state.lengths)
    ended = state.lengths + count >= state.limits
    stop_states = state.stop_states

    def end_at(stops: Array, count: Array, ended: Array) -> tuple[Array, Array]:
        # The text ends after the first of these tokens.
        end = jnp.where(stops.any(1), jnp.argmax(stops, axis=1) + 1, length + 1)
        return jnp.minimum(count, end), ended | (end <= count)

    # An end token or a stop text is part of what is emitted; all after it is not.
    if options.end_tokens:
        ends = jnp.isin(tokens, jnp.array(options.end_tokens, tokens.dtype))
        count, ended = end_at(ends, count, ended)
    if weights.stops is not None:
        states, stops = weights.stops.run(stop_states, tokens)
        count, ended = end_at(stops, count, ended)
        stop_states = _at(states, jnp.maximum(count, 1) - 1)
    return jnp.where(state.done, 0, count), ended, stop_states


def _first_path(tree: DraftTree, max_depth: int) -> Int[Array, "B L"]:
    """Tokens of the best-ranked draft: the path of best-ranked children."""
    node = jnp.zeros_like(tree.tokens[:, 0])  # The root; -1 below a leaf.
    tokens = [tree.tokens[:, 0]]
    for _ in range(max_depth - 1):
        children = (tree.parents == node[:, None]) & tree.valid & (node >= 0)[:, None]
        best = jnp.argmin(jnp.where(children, tree.ranks, tree.size), axis=1)
        node = jnp.where(children.any(1), best, -1)
        tokens.append(jnp.where(node < 0, -1, take(tree.tokens, node[:, None])[:, 0]))
    return jnp.stack(tokens, axis=1)


def _record(
    history: History | None,
    state: DecodeState,
    tree: DraftTree,
    *,
    proposed: Array,
    draft: Array,
    count: Array,
    rank: Array,
    entropies: Array | None,
) -> History | None:
    """The history with one more column, which is empty in finished rows."""
    if history is None:
        return None
    done, call = state.done, state.calls.max()
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=call, axis=0)
    columns = {
        "proposed": jnp.where(done[:, None], -1, proposed),
        "drafts": jnp.where(done[:, None], -1, draft),
        "accepted": count,
        "ranks": rank,
        "nodes": jnp.where(done, 0, tree.valid.sum(1, dtype=jnp.int32)),
    }
    if entropies is not None:
        columns["entropies"] = jnp.where(done[:, None], jnp.nan, entropies)
    put_all = {name: put(getattr(history, name), new) for name, new in columns.items()}
    return dataclasses.replace(history, **put_all)


@functools.partial(
    Program,
    static=("drafter", "options"),
    constants=("model", "weights"),
    donate=("state",),
)
def decode_on_device(
    model: DecodedModel,
    weights: Weights,
    drafter: Drafter,
    state: DecodeState,
    options: StepOptions,
    max_calls: Int[Array, ""] | None = None,
    done_rows: Int[Array, ""] | None = None,
) -> DecodeState:
    """Decodes on the device until all rows are done.

    Stops earlier after `max_calls` serial calls, or when `done_rows` rows are done.
    """

    def iterate(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, calls = carry
        # ---- Propose ----
        seen, memory, entropies = look(model, weights, drafter, state, options)
        tree = drafter.propose(seen, weights.drafter)
        state = dataclasses.replace(state, memory=memory)
        # ---- Verify, accept, commit ----
        state = serial_call(model, weights, drafter, state, tree, entropies, options)
        return state, calls + 1

    def continues(carry: tuple[DecodeState, Array]) -> Array:
        state, calls = carry
        count = state.done.shape[0] if done_rows is None else done_rows
        # Rows that are done compute along with the others, and accept nothing.
        running = state.done.sum() < count
        return running if max_calls is None else running & (calls < max_calls)

    return jax.lax.while_loop(continues, iterate, (state, jnp.int32(0)))[0]


_look = Program(look, static=("drafter", "options"), constants=("model", "weights"))
_serial_call = Program(
    serial_call,
    static=("drafter", "options"),
    constants=("model", "weights"),
    donate=("state",),
)


def decode_with_host(
    model: DecodedModel,
    weights: Weights,
    drafter: Drafter,
    state: DecodeState,
    options: StepOptions,
    max_calls: int | None = None,
    done_rows: int | None = None,
) -> DecodeState:
    """`decode_on_device` for drafters that propose on the host."""
    calls, static = 0, without_arrays(drafter)
    own = own_rows(len(state.done), model.mesh)
    while on_host(state.done).sum() < (done_rows or len(state.done)):
        if max_calls is not None and calls >= max_calls:
            break
        seen, memory, entropies = _look(model, weights, static, state, options)
        arrays = weights.drafter if drafter.on_device else None
        # The host waits for the device here: the price of drafting on the host.
        # Every process drafts for its own rows.
        seen = jax.tree.map(lambda x: x[own], on_host(seen))
        tree = from_own_rows(drafter.propose(seen, arrays), model.mesh)
        state = dataclasses.replace(state, memory=memory)
        state = _serial_call(model, weights, static, state, tree, entropies, options)
        calls += 1
    return state


def _at(values: Array, index: Int[Array, " B"]) -> Array:
    """Row b's entry `index[b]` along the second axis."""
    return jax.vmap(lambda row, i: row[i])(values, index)
