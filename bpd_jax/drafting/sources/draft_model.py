"""A draft model (Leviathan et al. 2023; Chen et al. 2023)."""

import dataclasses

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import setting
from bpd_jax.base.typing import Params
from bpd_jax.drafting.interface import Candidates, Extension, Prompts, Source, View
from bpd_jax.drafting.parts import (
    COUNT,
    MOST_DRAFTS,
    BuildContext,
    SearchPart,
    SourcePart,
    register,
)
from bpd_jax.drafting.small_lm import Reading, SmallLM
from bpd_jax.drafting.sources.heads import lattice_width
from bpd_jax.models.cache import KVCache
from bpd_jax.models.candidates import top_candidates


@dataclasses.dataclass(frozen=True)
class DraftModelSource(Source):
    """The W best next tokens of the draft model after each path.

    Attributes:
      block_size: L, number of draft tokens plus the certain token.
      width: W, candidates after each path.
    """

    block_size: int
    width: int
    small: SmallLM
    arrays: Params = dataclasses.field(compare=False)

    def remember(self, arrays: Params, prompts: Prompts) -> KVCache:
        """Reads the prompts."""
        return self.small.prefill(arrays, prompts.tokens, prompts.lengths)

    def start(
        self, view: View, arrays: Params, memory: KVCache
    ) -> tuple[Reading, KVCache]:
        """Reads the accepted tokens and the certain token."""
        reading = self.small.start(arrays, memory, view)
        return reading, reading.cache

    def candidates(self, arrays: Params, state: Reading, level: int) -> Candidates:
        """The best tokens, with their log-probabilities."""
        logits = self.small.logits(arrays, state.hidden)
        tokens, log_probs, _ = top_candidates(logits, self.width)
        return Candidates(tokens, log_probs)

    def extend(
        self, arrays: Params, state: Reading, level: int, extension: Extension
    ) -> Reading:
        """Reads the last tokens of the new paths."""
        return self.small.extend(arrays, state, level, extension)


# Default of W.
_WIDTH = 16


@dataclasses.dataclass(frozen=True)
class SequentialPart(SourcePart):
    """The settings of sources that draft token by token."""

    number_setting = "tokens"
    default_search = "chains"

    tokens: int = setting(5, "draft tokens", COUNT)
    k: int | None = setting(
        None, f"candidates after every path; default {_WIDTH}", COUNT.or_none()
    )

    def sizes(
        self, context: BuildContext, search: SearchPart, choices: int
    ) -> tuple[int, int]:
        """W, and the highest number of tokens that one serial call accepts.

        Args:
          choices: number of tokens to choose from.
        """
        width = lattice_width(context, self.k or min(_WIDTH, choices), choices)
        if search.drafts > width:
            raise UserError(
                f"{context.method} asks for {search.drafts} drafts with different "
                f"first tokens, but has only {width} candidates: give a larger k or "
                "fewer drafts."
            )
        if search.drafts * self.tokens > MOST_DRAFTS:
            raise UserError(
                f"{context.method} drafts {search.drafts * self.tokens} tokens in "
                f"every serial call, more than {MOST_DRAFTS}: give fewer drafts or "
                "draft tokens."
            )
        return width, max(self.tokens + 1, context.max_accepted)


@register
@dataclasses.dataclass(frozen=True)
class DraftModel(SequentialPart):
    """Settings of the source `draft_model`."""

    name = "draft_model"
    title = "Draft model, {tokens} tokens"
    help = "a smaller model"
    reference = "Leviathan et al. 2023; Chen et al. 2023"
    needs = ("draft_model",)
    reads_on = True

    def build(self, context: BuildContext, search: SearchPart) -> DraftModelSource:
        width, reach = self.sizes(context, search, context.vocab_size)
        small = context.need("draft_model")
        reader = SmallLM(small.sizes, reach, context.vocab_size)
        return DraftModelSource(self.tokens + 1, width, reader, small.params)
