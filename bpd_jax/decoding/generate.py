"""Decoding of prompts in batches: padding, timing, and collection of the results."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from bpd_jax.base.compiled import keeps_programs, padded_length
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decode_loop import (
    Weights,
    decode_on_device,
    decode_with_host,
    prefill,
)
from bpd_jax.decoding.decode_state import DecodeState, StopTable
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.interface import Drafter, without_arrays
from bpd_jax.models.model import Model
from bpd_jax.models.partitioning import even_rows, everywhere, in_rows, on_host
from bpd_jax.models.programs import compiled_ahead
from bpd_jax.models.transformer_config import check_token_ids
from bpd_jax.training import hosts

# Lowest number of columns that are read instead of all: compiling a program for fewer
# takes longer than it saves.
_SHORTEST_READ = 64

# More serial calls than any text takes.
_NO_LIMIT = 2**31 - 1


class Text(Protocol):
    """A prompt and the tokens decoded after it, int32."""

    @property
    def input_ids(self) -> np.ndarray: ...

    @property
    def output_ids(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Generation:
    """One decoded prompt.

    Attributes:
      input_ids: the prompt `[T]`, int32.
      output_ids: the decoded tokens, including an end-of-text token, int32.
      serial_calls: number of forward passes of the model, without the prefill.
      seconds: wall time of the batch, including prefill and excluding compilation,
        divided by its number of prompts.
      drafts: `[calls, L]`, the accepted draft of every serial call, padded with -1
        after its end and after the end of the text.
      accepted: `[calls]`, number of its tokens that were emitted.
      ranks: `[calls]`, its rank among the drafts; 0 is the best score.
      proposed: `[calls, L]`, the best-ranked draft of every call, padded with -1.
      nodes: `[calls]`, number of distinct prefixes that were verified.
      entropies: `[calls, L]`, entropies of the heads in nats; NaN without heads.
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
        """Decoded tokens per serial call (paper section 5); 0 without serial calls.

        Tokens after the end of the text or after the limit do not count.
        """
        return len(self.output_ids) / self.serial_calls if self.serial_calls else 0.0


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, a drafter and options: the configuration of `generate` and `stream`.

    Attributes:
      stops: the automaton of the stop texts, or None.
      make_reference: makes the reference texts of a batch (`Prompts.reference`) from
        the indices of its prompts, the batch size and the number of slots per row;
        None for methods without a reference.
    """

    model: Model
    drafter: Drafter
    options: DecodeOptions
    stops: StopTable | None = None
    make_reference: Callable[[Sequence[int], int, int], np.ndarray] | None = None

    @property
    def mesh(self) -> Mesh | None:
        """Devices that share the rows of a batch; None for one device."""
        return self.model.mesh

    @functools.cached_property
    def weights(self) -> Weights:
        """The arrays that jitted code reads, whole on every device of the mesh.

        Only arrays of the model itself, such as a shared softmax, remain sharded.
        """
        arrays = (self.drafter.arrays, self.stops)
        return Weights(*everywhere(arrays, self.mesh))

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the drafter, n-gram and stop tables that every device holds."""
        leaves = jax.tree.leaves(self.weights)
        return sum(x.nbytes for x in leaves if x.is_fully_replicated)

    def rows(self, count: int) -> int:
        """Rows of a batch of `count` prompts, the same number on every device."""
        return even_rows(count, self.mesh)

    def prefill(
        self,
        prompts: Sequence[np.ndarray],
        indices: Sequence[int],
        batch: int,
        new_tokens: int,
        padded: int | None = None,
        record: bool = True,
    ) -> DecodeState:
        """Runs some of the prompts and returns the state before the first serial call.

        Args:
          prompts: all prompts; they are padded to a common length.
          batch: number of rows; rows after the last index are padding.
          new_tokens: number of new tokens after which a row stops.
          padded: length that prompts are padded to; None for the shortest possible.
        """
        if padded is None:
            padded = padded_prompts(prompts)
        tokens = np.zeros((batch, padded), np.int32)
        lengths = np.ones(batch, np.int32)
        rows = np.zeros(batch, np.int32)
        rows[: len(indices)] = indices
        for row, index in enumerate(indices):
            tokens[row, : len(prompts[index])] = prompts[index]
            lengths[row] = len(prompts[index])
        # Padding rows are done from the beginning.
        limits = lengths + np.where(np.arange(batch) < len(indices), new_tokens, 0)
        slots = padded + self.options.max_new_tokens + self.drafter.max_depth
        reference = None
        if self.make_reference is not None:
            reference = self.make_reference(indices, batch, slots)
        tokens, lengths, limits, rows, reference = in_rows(
            (tokens, lengths, limits.astype(np.int32), rows, reference), self.mesh
        )
        return prefill(
            self.model,
            self.weights,
            self.drafter,
            tokens,
            lengths,
            limits,
            (np.uint32(self.options.seed), rows),
            reference,
            options=self.options.step,
            max_calls=self.options.max_new_tokens,
            record=record,
            read=columns_to_read(prompts, indices, padded),
        )

    def run(
        self,
        state: DecodeState,
        max_calls: int | None = None,
        done_rows: int | None = None,
    ) -> DecodeState:
        """Decodes until all rows or `done_rows` are done, or for `max_calls` calls."""
        # Always a number, so that `generate` and `stream` share a program.
        limit = np.int32(_NO_LIMIT if max_calls is None else max_calls)
        first, options = (self.model, self.weights), self.options.step
        if not self.drafter.on_device:
            return decode_with_host(
                *first, self.drafter, state, options, int(limit), done_rows
            )
        limit = everywhere(jax.device_put(limit), self.mesh)
        static = without_arrays(self.drafter)
        return decode_on_device(*first, static, state, options, limit, done_rows)


def generate(
    task: Task,
    prompts: Sequence[np.ndarray],
    *,
    on_progress: Callable[[int], object] = lambda tokens: None,
    padded: int | None = None,
) -> list[Generation]:
    """Decodes every prompt.

    Args:
      prompts: token ids, each `[T]`, validated by `Decoder.prepare`.
      on_progress: called after each batch with the number of new tokens.
      padded: length that prompts are padded to; None for the shortest possible.
    """
    options = task.options
    compile_task(task, prompts, padded=padded)
    generations: list[Generation] = []
    for indices in _batches(task, prompts):
        start = time.perf_counter()
        state = _run(task, prompts, indices, options.max_new_tokens, padded)
        # All processes have the same numbers, from which they may choose a method.
        seconds = hosts.agree(time.perf_counter() - start) / len(indices)
        generations += _collect(state, [prompts[i] for i in indices], seconds)
        on_progress(sum(len(g.output_ids) for g in generations[indices.start :]))
    return generations


def compile_task(
    task: Task, prompts: Sequence[np.ndarray], *, padded: int | None = None
) -> None:
    """Compiles the programs of `generate` for these prompts by decoding one token."""
    if not prompts:
        return
    width = padded or padded_prompts(prompts)
    by_columns: dict[int, range] = {}
    for indices in _batches(task, prompts):
        by_columns.setdefault(columns_to_read(prompts, indices, width), indices)
    first, *others = by_columns.values()
    if task.drafter.on_device and keeps_programs():
        with compiled_ahead():
            task.run(task.prefill(prompts, first, _batch(task, prompts), 1, padded))
    _run(task, prompts, first, 1, padded)
    for indices in others:
        state = task.prefill(prompts, indices, _batch(task, prompts), 1, padded)
        jax.block_until_ready(state)


def _batch(task: Task, prompts: Sequence[np.ndarray]) -> int:
    """The number of rows of each batch."""
    return task.rows(min(task.options.batch_size, max(len(prompts), 1)))


def _batches(task: Task, prompts: Sequence[np.ndarray]) -> Iterator[range]:
    """The indices of the prompts of each batch."""
    size = _batch(task, prompts)
    for begin in range(0, len(prompts), size):
        yield range(begin, min(begin + size, len(prompts)))


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


def padded_prompts(prompts: Sequence[np.ndarray]) -> int:
    """The length that these prompts are padded to."""
    return padded_length(max(len(prompt) for prompt in prompts))


def columns_to_read(
    prompts: Sequence[np.ndarray], indices: Sequence[int], padded: int
) -> int:
    """The columns of a batch's padded prompts that the model runs.

    They are all of them, a half or a quarter: prompts are padded to a common length, so
    that the decoding loop is compiled once, but short ones need not take as long as the
    longest.
    """
    longest = max((len(prompts[index]) for index in indices), default=0)
    shares = (padded_length(-(-padded // part)) for part in (4, 2))
    fitting = (share for share in shares if share >= max(longest, _SHORTEST_READ))
    return min(next(fitting, padded), padded)


def stream(
    task: Task, prompt: np.ndarray, *, calls: int = 1, padded: int | None = None
) -> Iterator[tuple[np.ndarray, Generation | None]]:
    """Decodes one prompt and yields its tokens incrementally.

    Args:
      prompt: token ids `[T]`, validated by `Decoder.prepare`.
      calls: number of serial calls after which new tokens are yielded.
      padded: length that the prompt is padded to; None for the shortest possible.

    Yields:
      New tokens, int32, and None; finally the last tokens and the complete
      generation.
    """
    start = time.perf_counter()
    new_tokens = task.options.max_new_tokens
    state = task.prefill([prompt], [0], task.rows(1), new_tokens, padded)
    shown, done = len(prompt), False
    while not done:
        state = task.run(state, calls)
        tokens, (length, *_), (done, *_) = on_host(
            (state.tokens, state.lengths, state.done)
        )
        if not done:
            yield tokens[0, shown:length], None
            shown = length
    seconds = time.perf_counter() - start
    generation = _collect(state, [prompt], seconds)[0]
    yield generation.output_ids[shown - len(prompt) :], generation


def check_prompts(
    model: Model,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    name: str = "model",
) -> None:
    """Refuses prompts that cannot be decoded."""
    longest = model.config.trunk.max_length - options.max_new_tokens
    vocab_size = model.config.trunk.vocab_size
    for index, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.size == 0:
            raise UserError(f"prompt {index + 1} is empty: give at least one token.")
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise UserError(
                f"prompt {index + 1} is not a list of token ids: give integers."
            )
        check_token_ids(ids, vocab_size, f"prompt {index + 1}")
        if longest < 1:
            raise UserError(
                f"max_new_tokens is {options.max_new_tokens}, but the {name} holds "
                f"{model.config.trunk.max_length} tokens including the prompt: lower "
                "max_new_tokens."
            )
        if len(prompt) > longest:
            raise UserError(
                f"prompt {index + 1} has {len(prompt)} tokens, but the {name} holds "
                f"{model.config.trunk.max_length} and max_new_tokens is "
                f"{options.max_new_tokens}: shorten the prompt to {longest} "
                "tokens or lower max_new_tokens."
            )


def _collect(
    state: DecodeState, prompts: Sequence[np.ndarray], seconds: float
) -> list[Generation]:
    tokens, lengths, calls, history = on_host(
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
