"""Prints an answer while it is decoded, and how fast that was."""

import numpy as np
from rich.console import Console

from bpd_jax import api
from bpd_jax.base import progress
from bpd_jax.decoding.generate import Generation, Task, compile_task, stream
from bpd_jax.reporting.terminal import print_stream, write


def print_answer(
    lm: api.LanguageModel,
    task: Task,
    prompt: np.ndarray,
    console: Console,
    *,
    before: str = "",
    marks: bool,
) -> Generation:
    """Decodes one prompt and prints its text incrementally.

    Programs are compiled first, so that `Generation.seconds` is without compiling.

    Args:
      prompt: token ids `[T]`, validated by `Decoder.prepare`.
      before: text that is printed dimmed before the answer.
      marks: whether accepted draft tokens are marked; see `print_stream`.
    """
    waiting = console.status if console.is_terminal else progress.waiting
    with waiting("compiling"):
        compile_task(task, [prompt])
    write(before, console, "dim")
    pieces = api.marked_pieces(lm, stream(task, prompt), task.options)
    if not marks:
        pieces = ((piece, False, last) for piece, _, last in pieces)
    generation = print_stream(pieces, console)
    assert generation is not None
    return generation


def speed_of(tokens: int, calls: int, seconds: float) -> str:
    """One line about the speed of decoding.

    >>> speed_of(64, 32, 1.6)
    '40 tokens per second, 2.00 tokens per call (64 tokens, 32 calls, 1.60 s)'
    """
    return (
        f"{tokens / max(seconds, 1e-9):.0f} tokens per second, "
        f"{tokens / max(calls, 1):.2f} tokens per call "
        f"({tokens} tokens, {calls} calls, {seconds:.2f} s)"
    )
