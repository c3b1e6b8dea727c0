"""Several methods on the same prompts: what each gains, and that none errs."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError
from bpd_jax.evaluation.equality import Difference, differences


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """What one method did with all prompts.

    Attributes:
      method: the method.
      label: what people read.
      generations: one per prompt.
      differences: prompts whose output is not the greedy one.
    """

    method: Method
    label: str
    generations: list[Generation]
    differences: list[Difference]

    @property
    def errors(self) -> list[Difference]:
        """The differences that rounding does not explain: each is a defect."""
        return [d for d in self.differences if not d.near_tie]


def compare(
    decoder: Decoder,
    methods: Sequence[Method],
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    on_progress: Callable[[str, int], object] = lambda label, tokens: None,
) -> list[MethodResult]:
    """Decodes all prompts by greedy decoding, then by every other method.

    Args:
      decoder: model and methods.
      methods: in the order of the table; greedy decoding is put first.
      prompts: token ids.
      options: lengths, temperature, batch size.
      on_progress: called with a method's label and a number of decoded tokens.

    Returns:
      One result per method, each compared with the greedy output.
    """
    ordered = dict.fromkeys([GREEDY, *methods])
    for method in ordered:
        # Validates the request before any work.
        decoder.check(method, prompts, options)
    results: list[MethodResult] = []
    for method in ordered:
        label = decoder.label(method)
        reference = results[0].generations if results else None
        generations = decoder.decode(
            method,
            prompts,
            options,
            reference=reference,
            on_progress=functools.partial(on_progress, label),
        )
        found = differences(
            decoder.model, decoder.params, reference or generations, generations
        )
        results.append(MethodResult(method, label, generations, found))
    return results


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
