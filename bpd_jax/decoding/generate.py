"""From prompts to texts: batching, timing, and what the loop's state says."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.choice import row_keys
from bpd_jax.decoding.loop import decode_loop, prefill
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.state import DecodeState
from bpd_jax.drafting.interface import Drafter
from bpd_jax.errors import UserError
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.typing import Params, PyTree

# Prompts are padded to a multiple of this, so that few shapes are compiled.
_PADDING = 32


@dataclasses.dataclass(frozen=True)
class Generation:
    """One decoded prompt.

    Attributes:
      input_ids: the prompt `[T]`, int32.
      output_ids: the decoded tokens, an end-of-text token included, int32.
      serial_calls: forward passes of the model; the prompt's own is not counted.
      seconds: wall time of its batch (prompt included, compilation not), divided by
        the number of prompts in it.
      drafts: the winning draft of every serial call `[calls, L]`, -1 past its end.
      accepted: how many of its tokens were emitted `[calls]`.
      ranks: its rank among the drafts `[calls]`, 0 for the best scored.
    """

    input_ids: np.ndarray
    output_ids: np.ndarray
    serial_calls: int
    seconds: float
    drafts: np.ndarray
    accepted: np.ndarray
    ranks: np.ndarray

    @property
    def block_efficiency(self) -> float:
        """Decoded tokens per serial call (paper section 5); 0 if nothing was decoded.

        Tokens past the end of the text or past the limit are not decoded and do not
        count.
        """
        return len(self.output_ids) / self.serial_calls if self.serial_calls else 0.0


def generate(
    model: ModelFunctions,
    params: Params,
    drafter: Drafter,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    *,
    make_draft_state: Callable[[Sequence[int], int, int], PyTree] | None = None,
    on_progress: Callable[[int], object] = lambda tokens: None,
) -> list[Generation]:
    """Decodes every prompt.

    Args:
      model: functions of the model.
      params: its parameters.
      drafter: the drafting method.
      prompts: token ids, each `[T]` with T of at least 1.
      options: lengths, temperature, batch size.
      make_draft_state: called with the indices of a batch's prompts, the batch size
        and the slots of a row; returns what the drafter's `look` gets.
      on_progress: called after each batch with the number of new tokens.

    Raises:
      UserError: a prompt is empty or leaves no room for `max_new_tokens`.
    """
    check_prompts(model, prompts, options)
    batch = min(options.batch_size, max(len(prompts), 1))
    longest = max((len(prompt) for prompt in prompts), default=0)
    padded = -(-longest // _PADDING) * _PADDING

    def run(indices: Sequence[int], new_tokens: int) -> DecodeState:
        tokens = np.zeros((batch, padded), np.int32)
        lengths = np.ones(batch, np.int32)
        for row, index in enumerate(indices):
            tokens[row, : len(prompts[index])] = prompts[index]
            lengths[row] = len(prompts[index])
        # Rows that only fill up the batch are done before they start.
        limits = lengths + np.where(np.arange(batch) < len(indices), new_tokens, 0)
        rows = np.zeros(batch, np.int32)
        rows[: len(indices)] = indices
        state = prefill(
            model,
            params,
            tokens,
            lengths,
            limits,
            row_keys(options.seed, jnp.asarray(rows)),
            options=options,
            max_calls=options.max_new_tokens,
            max_depth=drafter.max_depth,
        )
        draft_state = None
        if make_draft_state is not None:
            draft_state = make_draft_state(indices, batch, state.tokens.shape[1])
        state = decode_loop(drafter)(
            model, params, drafter, draft_state, state, options
        )
        return jax.block_until_ready(state)

    generations: list[Generation] = []
    for begin in range(0, len(prompts), batch):
        indices = range(begin, min(begin + batch, len(prompts)))
        if begin == 0:
            # One token, untimed: compiles everything.
            run(indices, 1)
        start = time.perf_counter()
        state = run(indices, options.max_new_tokens)
        seconds = (time.perf_counter() - start) / len(indices)
        generations += _collect(state, [prompts[i] for i in indices], seconds)
        on_progress(sum(len(g.output_ids) for g in generations[begin:]))
    return generations


def check_prompts(
    model: ModelFunctions, prompts: Sequence[np.ndarray], options: DecodeOptions
) -> None:
    """Raises a `UserError` for a prompt that cannot be decoded."""
    room = model.config.trunk.max_length - options.max_new_tokens
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"prompt {index + 1} is empty: give at least one token.")
        if len(prompt) > room:
            raise UserError(
                f"prompt {index + 1} has {len(prompt)} tokens, but the model holds "
                f"{model.config.trunk.max_length} and max_new_tokens is "
                f"{options.max_new_tokens}: shorten the prompt to {max(room, 0)} "
                "tokens or lower max_new_tokens."
            )


def _collect(
    state: DecodeState, prompts: Sequence[np.ndarray], seconds: float
) -> list[Generation]:
    host = jax.device_get(
        {
            "tokens": state.tokens,
            "lengths": state.lengths,
            "calls": state.calls,
            "history": state.history,
        }
    )
    collected = []
    for row, prompt in enumerate(prompts):
        calls = int(host["calls"][row])
        collected.append(
            Generation(
                input_ids=np.asarray(prompt, np.int32),
                output_ids=host["tokens"][row, len(prompt) : host["lengths"][row]],
                serial_calls=calls,
                seconds=seconds,
                drafts=host["history"].drafts[:calls, row],
                accepted=host["history"].accepted[:calls, row],
                ranks=host["history"].ranks[:calls, row],
            )
        )
    return collected
