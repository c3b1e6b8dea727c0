"""Several methods on the same prompts: what each gains, and that none errs."""

import concurrent.futures
import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.generate import Generation, compile_task
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError
from bpd_jax.evaluation.equality import Difference, differences

# Programs that are compiled at a time: tracing takes one core, the compiler another.
_COMPILERS = 2


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """What one method did with all prompts.

    Attributes:
      method: the method.
      label: display name.
      generations: one per prompt.
      differences: prompts whose output is not the greedy one.
      seconds: of all prompts, by round; empty where nothing was timed.
    """

    method: Method
    label: str
    generations: list[Generation]
    differences: list[Difference]
    seconds: tuple[float, ...] = ()

    @property
    def errors(self) -> list[Difference]:
        """The differences that rounding does not explain: each is a defect."""
        return [d for d in self.differences if not d.near_tie]

    def speedup(self, plain: "MethodResult") -> float | None:
        """How many times as fast as `plain` this method is; None if nothing was timed.

        The median over rounds of the ratio within a round, in which both met the same
        state of the machine.
        """
        if not self.seconds:
            return None
        pairs = zip(plain.seconds, self.seconds, strict=True)
        return statistics.median(reference / mine for reference, mine in pairs)


def compile_methods(
    decoder: Decoder,
    methods: Sequence[Method],
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    on_compiled: Callable[[str], object] = lambda label: None,
) -> None:
    """Compiles what `compare` needs, two methods at a time.

    The oracle is left out, which needs texts before it can draft.

    Args:
      decoder: model and methods.
      methods: besides greedy decoding.
      prompts: token ids.
      options: lengths, batch size.
      on_compiled: called with the label of every method that is ready.
    """
    tasks = {
        method: decoder.prepare(method, prompts, options)
        for method in dict.fromkeys([GREEDY, *methods])
        if not method.is_oracle
    }
    # The first one alone, because the others share a part of its programs.
    compile_task(tasks.pop(GREEDY), prompts)
    on_compiled(decoder.label(GREEDY))
    with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
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
) -> list[MethodResult]:
    """Decodes all prompts by greedy decoding, then by every other method.

    Args:
      decoder: model and methods.
      methods: in the order of the table; greedy decoding is put first.
      prompts: token ids.
      options: lengths, temperature, batch size.
      on_progress: called with a method's label and a number of decoded tokens.
      rounds: times that all methods take turns.

    Returns:
      One result per method, each compared with the greedy output in every round; the
      generations are those of the first round.
    """
    ordered = list(dict.fromkeys([GREEDY, *methods]))
    for method in ordered:
        # Validates the request before any work.
        decoder.check(method, prompts, options)
    decoded: dict[Method, list[Generation]] = {}
    seconds: dict[Method, list[float]] = {method: [] for method in ordered}
    found: dict[Method, dict[int, Difference]] = {method: {} for method in ordered}
    for _ in range(rounds):
        for method in ordered:
            generations = decoder.decode(
                method,
                prompts,
                options,
                reference=decoded.get(GREEDY),
                on_progress=functools.partial(on_progress, decoder.label(method)),
            )
            decoded.setdefault(method, generations)
            seconds[method].append(sum(text.seconds for text in generations))
            for difference in differences(
                decoder.model, decoder.params, decoded[GREEDY], generations
            ):
                found[method].setdefault(difference.prompt_index, difference)
    return [
        MethodResult(
            method,
            decoder.label(method),
            decoded[method],
            list(found[method].values()),
            tuple(seconds[method]),
        )
        for method in ordered
    ]


def fastest(results: Sequence[MethodResult]) -> Method:
    """The method that took the least time in the first round, the oracle aside."""
    real = [result for result in results if not result.method.is_oracle]
    return min(real, key=lambda result: result.seconds[0]).method


def fail_on_errors(results: Sequence[MethodResult], records: pathlib.Path) -> None:
    """Checks that every output is greedy decoding's, but for rounding.

    Args:
      results: of all methods.
      records: file to be sent with a report of the defect.

    Raises:
      UserError: one is not.
    """
    for result in results:
        for error in result.errors:
            raise UserError(
                f"NOT LOSSLESS: {result.label} differs from greedy decoding on prompt "
                f"{error.prompt_index + 1} at token {error.position + 1}, "
                f"{_reason(error)}; this is a defect of bpd_jax, please report it with "
                f"{records}."
            )


def _reason(error: Difference) -> str:
    if math.isinf(error.gap):
        return "where only one of the two texts ends"
    return (
        f"where the lower of the two tokens' logits is {error.gap:.2g} below the best, "
        "which rounding does not explain"
    )
