"""An EAGLE-3 drafter, which drafts token by token from the model's states."""

import dataclasses

import jax.numpy as jnp

from bpd_jax.base.typing import Params
from bpd_jax.drafting.assets import AttachedEagle
from bpd_jax.drafting.draft_tree import take
from bpd_jax.drafting.interface import (
    Candidates,
    Extension,
    Outcome,
    Prompts,
    Source,
    View,
)
from bpd_jax.drafting.parts import BuildContext, SearchPart, register
from bpd_jax.drafting.small_lm import Reading, attended, extended
from bpd_jax.drafting.sources.draft_model import SequentialPart
from bpd_jax.models.cache import KeyValues
from bpd_jax.models.eagle import EagleCache, EagleFunctions


@dataclasses.dataclass(frozen=True)
class EagleSource(Source):
    """The W best next tokens of an EAGLE-3 drafter after each path.

    Attributes:
      block_size: L, number of draft tokens plus the certain token.
      width: W, candidates after each path.
      reach: highest number of tokens that one serial call accepts.
      feature_layers: layers of the model whose states it reads.
    """

    block_size: int
    width: int
    reach: int
    functions: EagleFunctions
    feature_layers: tuple[int, ...] = dataclasses.field()
    arrays: Params = dataclasses.field(compare=False)

    def remember(self, arrays: Params, prompts: Prompts) -> EagleCache:
        """Reads the prompts."""
        return self.functions.prefill(
            arrays, prompts.tokens, prompts.features, prompts.lengths, self.reach
        )

    def learn(self, arrays: Params, memory: EagleCache, outcome: Outcome) -> EagleCache:
        """Keeps the states of the accepted tokens."""
        return self.functions.learn(arrays, memory, outcome.features)

    def start(
        self, view: View, arrays: Params, memory: EagleCache
    ) -> tuple[Reading, EagleCache]:
        """Reads the accepted tokens and the certain token."""
        memory, states = self.functions.read(
            arrays, memory, view.tokens, view.lengths, view.next_token
        )
        batch, heads, _, width = memory.context.values[0].shape
        none = jnp.zeros((1, batch, 0, heads, width), states.dtype)
        seen = jnp.zeros((batch, 1, 0), bool)
        reading = Reading(memory.context, KeyValues(none, none), seen, states)
        return reading, memory

    def candidates(self, arrays: Params, state: Reading, level: int) -> Candidates:
        """The best tokens, with their log-probabilities."""
        return Candidates(*self.functions.candidates(arrays, state.hidden, self.width))

    def extend(
        self, arrays: Params, state: Reading, level: int, extension: Extension
    ) -> Reading:
        """Reads the last tokens of the new paths."""
        seen = attended(state, extension)
        states, new = self.functions.extend(
            arrays,
            state.cache,
            state.drafted,
            extension.tokens,
            take(state.hidden, extension.parents),
            level,
            seen,
        )
        return Reading(state.cache, extended(state.drafted, new), seen, states)


@register
@dataclasses.dataclass(frozen=True)
class EaglePart(SequentialPart):
    """Settings of the source `eagle`."""

    name = "eagle"
    title = "EAGLE-3, {tokens} tokens"
    help = "an EAGLE-3 drafter, which reads the model's states"
    reference = "Li et al. 2025"
    needs = ("eagle",)
    needs_model = True
    reads_on = True

    def build(self, context: BuildContext, search: SearchPart) -> EagleSource:
        drafter: AttachedEagle = context.need("eagle")
        config = drafter.functions.config
        choices = config.draft_vocabulary or context.vocab_size
        width, reach = self.sizes(context, search, choices)
        return EagleSource(
            self.tokens + 1,
            width,
            reach,
            drafter.functions,
            config.feature_layers,
            drafter.params,
        )
