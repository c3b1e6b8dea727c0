"""From prompts to texts: batching, timing, and what the loop's state says."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax.decoding.loop import Weights, decode_loop, prefill
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.sampling import row_keys
from bpd_jax.decoding.state import DecodeState
from bpd_jax.decoding.stopping import StopTable
from bpd_jax.drafting.interface import Drafter
from bpd_jax.errors import UserError
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.models.partitioning import BATCH_SPEC
from bpd_jax.typing import Array, Params, PyTree

# Prompts are padded to a multiple of this, so that few shapes are compiled.
_PADDING = 32

# Turns that no text takes.
_NO_LIMIT = 2**31 - 1


class Text(Protocol):
    """Something with a prompt and what was decoded after it, int32 each."""

    @property
    def input_ids(self) -> np.ndarray: ...

    @property
    def output_ids(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Generation:
    """One decoded prompt.

    Attributes:
      input_ids: the prompt `[T]`, int32.
      output_ids: the decoded tokens, an end-of-text token included, int32.
      serial_calls: forward passes of the model; the prompt's own is not counted.
      seconds: wall time of its batch (prompt included, compilation not), divided by
        the number of prompts in it.
      drafts: the winning draft of every serial call `[calls, L]`, -1 past its end and
        past the end of the text.
      accepted: how many of its tokens were emitted `[calls]`.
      ranks: its rank among the drafts `[calls]`, 0 for the best scored.
      proposed: the best-ranked draft of every call `[calls, L]`, -1 past its end.
      nodes: different prefixes that every call checked `[calls]`.
      entropies: of the heads drafted from `[calls, L]`, in nats; NaN without heads.
    """

    input_ids: np.ndarray
    output_ids: np.ndarray
    serial_calls: int
    seconds: float
    drafts: np.ndarray
    accepted: np.ndarray
    ranks: np.ndarray
    proposed: np.ndarray
    nodes: np.ndarray
    entropies: np.ndarray

    @property
    def block_efficiency(self) -> float:
        """Decoded tokens per serial call (paper section 5); 0 if nothing was decoded.

        Tokens past the end of the text or past the limit are not decoded and do not
        count.
        """
        return len(self.output_ids) / self.serial_calls if self.serial_calls else 0.0


@dataclasses.dataclass(frozen=True)
class Task:
    """What `generate` and `stream` decode with.

    Attributes:
      model: functions of the model.
      params: its parameters.
      drafter: the drafting method.
      options: lengths, temperature, batch size.
      stops: the automaton of the options' stop texts, or None.
      give: called with the indices of a batch's prompts, the batch size and the slots
        of a row; returns what the drafter is given of them (see `Drafter.start`).
      mesh: over which the rows of a batch are spread, or None.
    """

    model: ModelFunctions
    params: Params
    drafter: Drafter
    options: DecodeOptions
    stops: StopTable | None = None
    give: Callable[[Sequence[int], int, int], PyTree] | None = None
    mesh: Mesh | None = None

    @functools.cached_property
    def weights(self) -> Weights:
        """What the jitted code reads, on the devices that read it."""
        arrays = (self.drafter.arrays, self.stops)
        if self.mesh is not None:
            everywhere = NamedSharding(self.mesh, PartitionSpec())

            def placed(leaf: Array) -> Array:
                there = isinstance(getattr(leaf, "sharding", None), NamedSharding)
                return leaf if there else jax.device_put(leaf, everywhere)

            arrays = jax.tree.map(placed, arrays)
        return Weights(self.params, *arrays)

    def rows(self, count: int) -> int:
        """The batch that decodes `count` prompts: every device gets as many rows."""
        if self.mesh is None:
            return count
        devices = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        return -(-count // devices) * devices

    def prefill(
        self,
        prompts: Sequence[np.ndarray],
        indices: Sequence[int],
        batch: int,
        new_tokens: int,
        padded: int | None = None,
        record: bool = True,
    ) -> DecodeState:
        """The state before the first serial call of some of the prompts.

        Args:
          prompts: all of them, for a common length.
          indices: those that are decoded.
          batch: rows; those past the indices only fill up.
          new_tokens: at which each row stops.
          padded: to which prompts are padded; None for the least.
          record: whether the state has a history.
        """
        if padded is None:
            padded = padded_length(prompts)
        tokens = np.zeros((batch, padded), np.int32)
        lengths = np.ones(batch, np.int32)
        rows = np.zeros(batch, np.int32)
        rows[: len(indices)] = indices
        for row, index in enumerate(indices):
            tokens[row, : len(prompts[index])] = prompts[index]
            lengths[row] = len(prompts[index])
        # Rows that only fill up the batch are done before they start.
        limits = lengths + np.where(np.arange(batch) < len(indices), new_tokens, 0)
        slots = padded + self.options.max_new_tokens + self.drafter.max_depth
        given = self.give(indices, batch, slots) if self.give else None
        keys = row_keys(self.options.seed, jnp.asarray(rows))
        arrays: Any = (tokens, lengths, limits.astype(np.int32), keys, given)
        if self.mesh is not None:
            spread = NamedSharding(self.mesh, BATCH_SPEC)
            arrays = jax.tree.map(lambda x: jax.device_put(x, spread), arrays)
        return prefill(
            self.model,
            self.weights,
            self.drafter,
            *arrays,
            options=self.options.step,
            max_calls=self.options.max_new_tokens,
            record=record,
        )

    def run(
        self,
        state: DecodeState,
        max_turns: int | None = None,
        enough: int | None = None,
    ) -> DecodeState:
        """Decodes until every row is done, or `enough` are, or for some calls."""
        # Always a number, so that `generate` and `stream` share a program.
        limit = np.int32(_NO_LIMIT if max_turns is None else max_turns)
        everywhere = None
        if self.mesh is not None:
            everywhere = NamedSharding(self.mesh, PartitionSpec())
        loop = decode_loop(self.drafter)
        return loop(
            self.model,
            self.weights,
            self.drafter,
            state,
            self.options.step,
            jax.device_put(limit, everywhere) if self.drafter.on_device else limit,
            enough,
        )


def generate(
    task: Task,
    prompts: Sequence[np.ndarray],
    *,
    on_progress: Callable[[int], object] = lambda tokens: None,
    padded: int | None = None,
) -> list[Generation]:
    """Decodes every prompt.

    Args:
      task: model, method and options.
      prompts: token ids, each `[T]`, that `Decoder.prepare` has validated.
      on_progress: called after each batch with the number of new tokens.
      padded: to which prompts are padded; None for the least.
    """
    options = task.options
    batch = _batch(task, prompts)
    compile_task(task, prompts, padded=padded)
    generations: list[Generation] = []
    for begin in range(0, len(prompts), batch):
        indices = range(begin, min(begin + batch, len(prompts)))
        start = time.perf_counter()
        state = _run(task, prompts, indices, options.max_new_tokens, padded)
        seconds = (time.perf_counter() - start) / len(indices)
        generations += _collect(state, [prompts[i] for i in indices], seconds)
        on_progress(sum(len(g.output_ids) for g in generations[begin:]))
    return generations


def compile_task(
    task: Task, prompts: Sequence[np.ndarray], *, padded: int | None = None
) -> None:
    """Compiles what `generate` needs for these prompts, by decoding one token.

    Args:
      task: model, method and options.
      prompts: that will be decoded.
      padded: as for `generate`.
    """
    if prompts:
        indices = range(min(_batch(task, prompts), len(prompts)))
        _run(task, prompts, indices, 1, padded)


def _batch(task: Task, prompts: Sequence[np.ndarray]) -> int:
    """Rows of the batches in which the prompts are decoded."""
    return task.rows(min(task.options.batch_size, max(len(prompts), 1)))


def _run(
    task: Task,
    prompts: Sequence[np.ndarray],
    indices: Sequence[int],
    new_tokens: int,
    padded: int | None,
) -> DecodeState:
    """The final state of one batch."""
    state = task.prefill(prompts, indices, _batch(task, prompts), new_tokens, padded)
    return jax.block_until_ready(task.run(state))


def padded_length(prompts: Sequence[np.ndarray]) -> int:
    """Tokens that every one of these prompts is padded to."""
    longest = max(len(prompt) for prompt in prompts)
    return -(-longest // _PADDING) * _PADDING


def stream(
    task: Task, prompt: np.ndarray, *, calls: int = 1, padded: int | None = None
) -> Iterator[tuple[np.ndarray, Generation | None]]:
    """Decodes one prompt and yields its tokens as they come.

    Args:
      task: model, method and options.
      prompt: token ids `[T]`, that `Decoder.prepare` has validated.
      calls: serial calls between two looks at the state.
      padded: tokens that the prompt is padded to; None for the least.

    Yields:
      New tokens, int32, with None; at last what is left, with the whole generation.
    """
    start = time.perf_counter()
    new_tokens = task.options.max_new_tokens
    state = task.prefill([prompt], [0], task.rows(1), new_tokens, padded)
    shown = len(prompt)
    while not bool(state.done[0]):
        state = task.run(state, calls)
        length = int(state.lengths[0])
        if not bool(state.done[0]):
            yield np.asarray(state.tokens[0, shown:length]), None
            shown = length
    seconds = time.perf_counter() - start
    generation = _collect(state, [prompt], seconds)[0]
    yield generation.output_ids[shown - len(prompt) :], generation


def check_prompts(
    model: ModelFunctions,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    name: str = "model",
) -> None:
    """Raises a `UserError` for a prompt that cannot be decoded.

    Args:
      model: that is to read the texts.
      prompts: token ids, each `[T]`.
      options: how long the texts become.
      name: of the model, for people.
    """
    room = model.config.trunk.max_length - options.max_new_tokens
    vocab_size = model.config.trunk.vocab_size
    for index, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.size == 0:
            raise UserError(f"prompt {index + 1} is empty: give at least one token.")
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise UserError(
                f"prompt {index + 1} is not a list of token ids: give integers."
            )
        if np.min(prompt) < 0 or np.max(prompt) >= vocab_size:
            raise UserError(
                f"prompt {index + 1} has token ids outside 0 … {vocab_size - 1}: "
                "encode it with the model's own tokenizer."
            )
        if room < 1:
            raise UserError(
                f"max_new_tokens is {options.max_new_tokens}, but the {name} holds "
                f"{model.config.trunk.max_length} tokens, prompt included: lower it."
            )
        if len(prompt) > room:
            raise UserError(
                f"prompt {index + 1} has {len(prompt)} tokens, but the {name} holds "
                f"{model.config.trunk.max_length} and max_new_tokens is "
                f"{options.max_new_tokens}: shorten the prompt to {max(room, 0)} "
                "tokens or lower max_new_tokens."
            )


def _collect(
    state: DecodeState, prompts: Sequence[np.ndarray], seconds: float
) -> list[Generation]:
    tokens, lengths, calls, history = jax.device_get(
        (state.tokens, state.lengths, state.calls, state.history)
    )
    return [
        Generation(
            input_ids=np.asarray(prompt, np.int32),
            output_ids=tokens[row, len(prompt) : lengths[row]],
            serial_calls=int(calls[row]),
            seconds=seconds,
            **{
                field.name: getattr(history, field.name)[: calls[row], row]
                for field in dataclasses.fields(history)
            },
        )
        for row, prompt in enumerate(prompts)
    ]
