"""The fastest method for some prompts: candidates, and the choice of `tune` and `auto`.

`decoding.compare` decodes the prompts with each method in turn and measures the time.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.aliases import bpd, draft_model, medusa, ngram, prompt_lookup
from bpd_jax.decoding.call_price import with_measured_price
from bpd_jax.decoding.compare import MethodResult, compare, compile_methods, fastest
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.searches.beam_search import Greedy
from bpd_jax.drafting.searches.tree import Tree
from bpd_jax.drafting.sources.block import Block
from bpd_jax.drafting.sources.lookup import Lookup

# Drafting is chosen above this speed-up: times are not exact.
_MARGIN = 1.05

# Highest numbers of prompts, besides a batch, and of tokens that `auto` decodes.
_TRIAL_TEXTS, _TRIAL_TOKENS = 4, 64


def candidate_methods(
    decoder: Decoder, prompts: Sequence[np.ndarray], options: DecodeOptions
) -> list[Method]:
    """The methods that `tune` and `auto` measure unless others are named."""
    assets = decoder.assets
    methods = [decoder.default_method, prompt_lookup(4)]
    if decoder.model.block_size > 1:
        methods += [bpd(), medusa(8)]
        if assets.ngram is not None:
            methods += [ngram(4), ngram(16, search="best", adaptive=1)]
    if assets.drafter is not None:
        source, refiners = decoder.refined_block
        methods += [
            Method(Block(), (), Greedy()),
            Method(Block(), (), Tree(8), Lookup(4)),
            Method(source, refiners, Tree(16, min_prob=0.05), Lookup(8)),
        ]
    if assets.draft_model is not None:
        methods.append(draft_model(4))

    def is_possible(method: Method) -> bool:
        """Whether there are enough paths, and small LMs have room for the texts."""
        try:
            decoder.check(method, prompts, options)
        except UserError:
            return False
        return True

    return [method for method in dict.fromkeys(methods) if is_possible(method)]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fastest of some methods that were measured.

    Attributes:
      method: plain decoding if no other is faster by more than chance.
      fastest: the fastest one besides it, and its speed-up.
    """

    method: Method
    fastest: Method
    speedup: float

    @classmethod
    def among(cls, results: Sequence[MethodResult]) -> "Choice":
        """Chooses among the results of `compare`, of which the first is plain."""
        if all(result.method.is_oracle for result in results[1:]):
            raise UserError("there is no method to compare with plain decoding.")
        best = fastest(results, plain=False)
        speedup = best.speedup(results[0]) or 0.0
        method = best.method if speedup > _MARGIN else GREEDY
        return cls(method, best.method, speedup)

    def __str__(self) -> str:
        """One line with the choice and its reason."""
        reason = f"{self.speedup:.2f} times as fast as plain decoding on these prompts"
        if self.method == GREEDY:
            return f"greedy: no method is faster; {self.fastest.name} is {reason}."
        return f"{self.method.name}, {reason}."


def choose_method(
    decoder: Decoder,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    *,
    methods: Sequence[Method] | None = None,
    on_progress: Callable[[str, int], object] = lambda label, tokens: None,
) -> Choice:
    """Decodes some of the prompts with every method and chooses the fastest.

    Args:
      prompts: the first batch, or a few of them, are decoded, up to 64 tokens of each.
      methods: methods to choose from; by default `candidate_methods`.
    """
    if not prompts:
        raise UserError("--method=auto needs prompts to compare methods on.")
    tokens = min(options.max_new_tokens, _TRIAL_TOKENS)
    trial = dataclasses.replace(options, max_new_tokens=tokens)
    sample = list(prompts[: max(options.batch_size, _TRIAL_TEXTS)])
    if methods is None:
        methods = candidate_methods(decoder, sample, trial)
    methods = priced(decoder, methods, sample, trial)
    compile_methods(decoder, methods, sample, trial)
    return Choice.among(compare(decoder, methods, sample, trial, on_progress))


def priced(
    decoder: Decoder,
    methods: Sequence[Method],
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
) -> list[Method]:
    """The methods, of which the default one has the measured price of its calls."""
    default = decoder.default_method
    return [
        with_measured_price(decoder, method, prompts, options)
        if method == default
        else method
        for method in methods
    ]


def tuned_choice(
    path: str, facts: Mapping[str, Any], device: str, batch_size: int
) -> Method | None:
    """The choice of `bpd_jax.tune` for a batch size on a device; None if there is none.

    Args:
      path: path of `drafting.json`, for messages.
      device: description of the device; see `provenance.device`.
    """
    try:
        name = facts["choices"].get(str(batch_size))
        if name is None or facts["device"] != device:
            return None
        return parse_method(name)
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} has no valid choices of methods: {error}; run bpd_jax.tune again."
        ) from error
