"""Compares methods on the same prompts: speed, and equality of their texts."""

import concurrent.futures
import dataclasses
import functools
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.generate import Generation, compile_task
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.models.model import Model
from bpd_jax.models.partitioning import on_host
from bpd_jax.models.segment_attention import Segments
from bpd_jax.training import hosts

# Two logits closer than this are equal up to rounding: a forward pass of another shape
# sums the same numbers in another order, and either token may have the larger logit. A
# logit of 16 has a rounding error of 0.06 in bfloat16 and 0.008 in float16, and the
# layers of the trunk add to it.
NEAR_TIES = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.03}

# Number of programs compiled at once: one is traced at a time, and a compiler uses more
# than one core for a part of its work.
_COMPILERS = max(2, (os.cpu_count() or 1) // 2)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between a text and the reference.

    Attributes:
      prompt_index: index of the prompt.
      position: index in `output_ids` of the first token that differs.
      gap: difference between the model's largest logit at that position and the lower
        logit of the two tokens; infinite if one of the texts has ended there.
      near_tie: whether both tokens are the most probable one, up to rounding. False
        for a text that merely stops early: the end-of-text token is part of a text.
    """

    prompt_index: int
    position: int
    gap: float
    near_tie: bool


def divergence(
    differences: Sequence[Difference], prompts: int
) -> dict[str, float] | None:
    """Summarises the differences of a number of prompts.

    Returns:
      `rate`, the share of prompts whose text differs; `first`, the smallest number,
      from 1, of a differing token; and `gap`, the median of the finite gaps, 0 without
      one. None if all texts are equal.
    """
    if not differences:
        return None
    gaps = [d.gap for d in differences if np.isfinite(d.gap)]
    return {
        "rate": len(differences) / prompts,
        "first": 1 + min(difference.position for difference in differences),
        "gap": float(np.median(gaps)) if gaps else 0.0,
    }


def first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    """Index of the first differing element; None if both arrays are equal.

    >>> first_difference(np.array([1, 2, 3]), np.array([1, 2]))
    2
    """
    if np.array_equal(a, b):
        return None
    shared = min(len(a), len(b))
    differing = np.flatnonzero(a[:shared] != b[:shared])
    return int(differing[0]) if differing.size else shared


def differences(
    model: Model,
    reference: Sequence[Generation],
    other: Sequence[Generation],
) -> list[Difference]:
    """The prompts whose greedy output differs from the reference in some token.

    The model runs only for prompts whose outputs differ.
    """
    results = []
    tie = NEAR_TIES[model.config.trunk.dtype]
    for index, (expected, actual) in enumerate(zip(reference, other, strict=True)):
        position = first_difference(expected.output_ids, actual.output_ids)
        if position is not None:
            gap = _gap(model, expected, actual, position)
            results.append(Difference(index, position, gap, gap < tie))
    return results


def _gap(
    model: Model,
    expected: Generation,
    actual: Generation,
    position: int,
) -> float:
    """The `gap` of two texts that differ first at `position`."""
    if position >= min(len(expected.output_ids), len(actual.output_ids)):
        return float("inf")
    text = np.concatenate([expected.input_ids, expected.output_ids[:position]])
    tokens = jnp.asarray(text)[None]
    positions = jnp.arange(len(text))[None]
    hidden, *_ = model.forward(tokens, positions, Segments())
    logits = on_host(model.next_token_logits(hidden[0, -1]))
    chosen = [expected.output_ids[position], actual.output_ids[position]]
    return float(logits.max() - logits[chosen].min())


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """The results of one method on all prompts.

    Attributes:
      label: display name.
      generations: one per prompt.
      differences: prompts whose output differs from that of greedy decoding.
      text_seconds: duration of each prompt in each round; empty if nothing was timed.
    """

    method: Method
    label: str
    generations: list[Generation]
    differences: list[Difference]
    text_seconds: tuple[tuple[float, ...], ...] = ()

    @property
    def seconds(self) -> tuple[float, ...]:
        """Duration of all prompts in each round."""
        return tuple(map(sum, self.text_seconds))

    @property
    def errors(self) -> list[Difference]:
        """The differences that rounding does not explain: each is a defect."""
        return [d for d in self.differences if not d.near_tie]

    def speedup(self, plain: "MethodResult") -> float | None:
        """Speed-up over `plain`; None if nothing was timed.

        This is the median over rounds of the ratio within a round, because the load of
        the machine may change between rounds.
        """
        return _median_ratio(plain.seconds, self.seconds) if self.seconds else None

    def speedup_of(self, plain: "MethodResult", prompts: slice) -> float:
        """Speed-up over `plain` on some of the prompts, likewise."""
        return _median_ratio(
            [sum(texts[prompts]) for texts in plain.text_seconds],
            [sum(texts[prompts]) for texts in self.text_seconds],
        )


def _median_ratio(plain: Sequence[float], other: Sequence[float]) -> float:
    pairs = zip(plain, other, strict=True)
    return statistics.median(reference / seconds for reference, seconds in pairs)


def compile_methods(
    decoder: Decoder,
    methods: Sequence[Method],
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    on_compiled: Callable[[str], object] = lambda label: None,
) -> None:
    """Compiles the programs that `compare` needs, several methods at a time.

    The oracle is skipped, because it needs the texts of greedy decoding first.
    """
    tasks = {
        method: decoder.prepare(method, prompts, options)
        for method in dict.fromkeys([GREEDY, *methods])
        if not method.is_oracle
    }
    # Greedy decoding comes first, because the other methods share some of its programs.
    compile_task(tasks.pop(GREEDY), prompts)
    on_compiled(decoder.label(GREEDY))
    # Several processes must start programs in the same order.
    compilers = _COMPILERS if hosts.count() == 1 else 1
    with concurrent.futures.ThreadPoolExecutor(compilers) as pool:
        waiting = {
            pool.submit(compile_task, task, prompts): method
            for method, task in tasks.items()
        }
        for done in concurrent.futures.as_completed(waiting):
            done.result()
            on_compiled(decoder.label(waiting[done]))


def compare(
    decoder: Decoder,
    methods: Sequence[Method],
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    on_progress: Callable[[str, int], object] = lambda label, tokens: None,
    *,
    rounds: int = 1,
    seconds: float = 0.0,
) -> list[MethodResult]:
    """Decodes all prompts by greedy decoding, then by every other method.

    Args:
      decoder: model and methods.
      methods: in the order of the table; greedy decoding always comes first.
      prompts: token ids.
      options: lengths, temperature, batch size.
      on_progress: called with a method's label and a number of decoded tokens.
      rounds: number of times that all methods are run, in alternation.
      seconds: further rounds begin until so much time is used, compiling included.

    Returns:
      One result per method, each compared with the greedy output in every round; the
      generations are those of the first round.
    """
    ordered = list(dict.fromkeys([GREEDY, *methods]))
    for method in ordered:
        # Validates the request before any work.
        decoder.check(method, prompts, options)
    decoded: dict[Method, list[Generation]] = {}
    times: dict[Method, list[tuple[float, ...]]] = {method: [] for method in ordered}
    by_prompt: dict[Method, dict[int, Difference]] = {method: {} for method in ordered}
    begin, done = time.perf_counter(), 0
    while done < rounds or hosts.agree(time.perf_counter() - begin) < seconds:
        done += 1
        for method in ordered:
            generations = decoder.decode(
                method,
                prompts,
                options,
                reference=decoded.get(GREEDY),
                on_progress=functools.partial(on_progress, decoder.label(method)),
            )
            decoded.setdefault(method, generations)
            times[method].append(tuple(text.seconds for text in generations))
            for difference in differences(decoder.model, decoded[GREEDY], generations):
                by_prompt[method].setdefault(difference.prompt_index, difference)
    return [
        MethodResult(
            method,
            decoder.label(method),
            decoded[method],
            list(by_prompt[method].values()),
            tuple(times[method]),
        )
        for method in ordered
    ]


def fastest(results: Sequence[MethodResult], *, plain: bool = True) -> MethodResult:
    """The result with the highest speed-up over the first one, except the oracle.

    `plain` is whether it may be the first one.
    """
    real = results if plain else results[1:]
    real = [result for result in real if not result.method.is_oracle]
    return max(real, key=lambda result: result.speedup(results[0]) or 0.0)


def fail_on_errors(results: Sequence[MethodResult], records: pathlib.Path) -> None:
    """Checks that every output equals that of greedy decoding, up to rounding.

    Args:
      results: one per method.
      records: file that the error message asks to attach to a bug report.
    """
    for result in results:
        for error in result.errors:
            reason = (
                f"where the lower of the two tokens' logits is {error.gap:.2g} below "
                "the best, which rounding does not explain"
            )
            if math.isinf(error.gap):
                reason = "where only one of the two texts ends"
            raise UserError(
                f"NOT LOSSLESS: {result.label} differs from greedy decoding on prompt "
                f"{error.prompt_index + 1} at token {error.position + 1}, "
                f"{reason}; this is a defect of bpd_jax, please report it with "
                f"{records}."
            )
