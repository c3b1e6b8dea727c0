"""The decode loop: propose → verify → accept → commit, for every method.

One turn is one serial call of the model. Methods that run on the device decode in a
single `lax.while_loop`; a method whose second half runs on the host takes the same
two halves of a turn, jitted one by one, with a host step between them.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.accept import longest_match
from bpd_jax.decoding.choice import choose
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.state import DecodeState, History, empty_history
from bpd_jax.drafting.interface import Drafter, View
from bpd_jax.drafting.tree import DraftTree, ancestor_mask
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.cache import KeyValues, commit, write_rows
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.typing import Array, Int, Params, PyTree


@functools.partial(
    jax.jit, static_argnames=("model", "options", "max_calls", "max_depth")
)
def prefill(
    model: ModelFunctions,
    params: Params,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    limits: Int[Array, " B"],
    keys: Array,
    *,
    options: DecodeOptions,
    max_calls: int,
    max_depth: int,
) -> DecodeState:
    """Runs the prompts and returns the state before the first serial call.

    Args:
      model: functions of the model.
      params: its parameters.
      prompts: padded on the right.
      lengths: of the prompts, at least 1.
      limits: the text length at which each row stops; at most `max_calls` more than
        the longest prompt.
      keys: one random key per row.
      options: how tokens are chosen.
      max_calls: columns of the history.
      max_depth: the most tokens of a draft.
    """
    batch, padded = prompts.shape
    positions = jnp.broadcast_to(jnp.arange(padded), prompts.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    hidden, new = model.forward(params, prompts, positions, causal_mask(segments))
    # A commit writes a whole block, so a full row needs one more block of slots.
    slots = padded + max_calls + max_depth
    last = _at(hidden, lengths - 1)
    logits = model.next_token_logits(params, last)
    next_token = choose(logits[:, None], lengths[:, None], keys, options.temperature)
    tokens = jnp.zeros((batch, slots), jnp.int32).at[:, :padded].set(prompts)
    return DecodeState(
        tokens=tokens,
        limits=limits,
        cache=commit(model.empty_cache(batch, slots), new, lengths),
        hidden=last,
        next_token=next_token[:, 0],
        keys=keys,
        done=lengths >= limits,
        calls=jnp.zeros((batch,), jnp.int32),
        history=empty_history(max_calls, batch, max_depth),
    )


def look(
    model: ModelFunctions,
    params: Params,
    drafter: Drafter,
    draft_state: PyTree,
    state: DecodeState,
) -> PyTree:
    """First half of a turn: what the drafter wants to see of the state."""
    view = View(
        tokens=state.tokens,
        lengths=state.lengths,
        next_token=state.next_token,
        hidden=state.hidden,
        head_logits=functools.partial(model.head_logits, params),
    )
    return drafter.look(view, draft_state)


def serial_call(
    model: ModelFunctions,
    params: Params,
    state: DecodeState,
    tree: DraftTree,
    *,
    options: DecodeOptions,
    max_depth: int,
) -> DecodeState:
    """Second half of a turn: one forward pass over the drafts, then its outcome.

    Worked example (greedy text `a b c e …`, state just before `a`, draft `a b x d`):
    `a` is certain; the model says `b` after `a` and `c` after `b`, so `x` is wrong.
    Two tokens are committed and `c` is the next certain token.
    """
    depths = state.lengths[:, None] + tree.depths
    mask = ancestor_mask(tree, max_depth)
    hidden, new = model.forward(params, tree.tokens, depths, mask, state.cache)
    logits = model.next_token_logits(params, hidden)
    choices = choose(logits, depths + 1, state.keys, options.temperature)
    accepted = longest_match(tree, choices, state.next_token, max_depth)

    path = jnp.maximum(accepted.path, 0)
    tokens = jnp.take_along_axis(tree.tokens, path, axis=1)
    count = jnp.minimum(accepted.count, state.limits - state.lengths)
    ended = state.lengths + count >= state.limits
    if options.end_of_text is not None:
        # The text stops right after its first end-of-text token.
        is_end = tokens == options.end_of_text
        end = jnp.where(is_end.any(1), jnp.argmax(is_end, axis=1) + 1, max_depth + 1)
        ended |= end <= count
        count = jnp.minimum(count, end)
    count = jnp.where(state.done, 0, count)

    index = path[None, :, :, None, None]
    accepted_new = KeyValues(
        keys=jnp.take_along_axis(new.keys, index, axis=2),
        values=jnp.take_along_axis(new.values, index, axis=2),
    )
    last = _at(path, jnp.maximum(count, 1) - 1)
    done = state.done
    draft = jnp.where(done[:, None] | (accepted.path < 0), -1, tokens)
    turn = state.calls.max()
    put = jax.lax.dynamic_update_index_in_dim
    return dataclasses.replace(
        state,
        tokens=write_rows(state.tokens, tokens, state.lengths),
        cache=commit(state.cache, accepted_new, count),
        hidden=jnp.where(done[:, None], state.hidden, _at(hidden, last)),
        next_token=jnp.where(done, state.next_token, _at(choices, last)),
        done=done | ended,
        calls=state.calls + ~done,
        history=History(
            drafts=put(state.history.drafts, draft, turn, 0),
            accepted=put(state.history.accepted, count, turn, 0),
            ranks=put(state.history.ranks, accepted.rank, turn, 0),
        ),
    )


@functools.partial(
    jax.jit, static_argnames=("model", "drafter", "options"), donate_argnames="state"
)
def decode_on_device(
    model: ModelFunctions,
    params: Params,
    drafter: Drafter,
    draft_state: PyTree,
    state: DecodeState,
    options: DecodeOptions,
) -> DecodeState:
    """Decodes until every row is done, without leaving the device."""

    def turn(state: DecodeState) -> DecodeState:
        tree = drafter.propose(look(model, params, drafter, draft_state, state))
        return serial_call(
            model, params, state, tree, options=options, max_depth=drafter.max_depth
        )

    return jax.lax.while_loop(lambda state: ~state.done.all(), turn, state)


_look = jax.jit(look, static_argnames=("model", "drafter"))
_serial_call = jax.jit(
    serial_call,
    static_argnames=("model", "options", "max_depth"),
    donate_argnames="state",
)


def decode_with_host(
    model: ModelFunctions,
    params: Params,
    drafter: Drafter,
    draft_state: PyTree,
    state: DecodeState,
    options: DecodeOptions,
) -> DecodeState:
    """Decodes until every row is done; the drafter's second half runs on the host."""
    while not np.asarray(state.done).all():
        seen = jax.device_get(_look(model, params, drafter, draft_state, state))
        tree = drafter.propose(seen)
        state = _serial_call(
            model, params, state, tree, options=options, max_depth=drafter.max_depth
        )
    return state


def decode_loop(drafter: Drafter) -> Callable[..., DecodeState]:
    """The loop that suits where the drafter runs."""
    return decode_on_device if drafter.on_device else decode_with_host


def _at(values: Array, index: Int[Array, " B"]) -> Array:
    """Row b's entry `index[b]` along the second axis."""
    return jax.vmap(lambda row, i: row[i])(values, index)
