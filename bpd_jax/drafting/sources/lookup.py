"""Prompt lookup: drafts are copied from the text itself (Saxena 2023)."""

import dataclasses

import jax.numpy as jnp

from bpd_jax.base.settings import integer, setting
from bpd_jax.base.typing import PyTree
from bpd_jax.drafting.draft_tree import DraftTree, from_chain
from bpd_jax.drafting.interface import Drafter, View
from bpd_jax.drafting.parts import (
    COUNT,
    BuildContext,
    StandalonePart,
    register,
)


@dataclasses.dataclass(frozen=True)
class PromptLookup(Drafter):
    """Drafts the tokens after the last earlier occurrence of the end of the text.

    The last n tokens, the certain one included, are searched for in the text before
    them, with the largest possible n up to `match`; the last occurrence is used.

    A copy that reaches the end of the text continues with the copied tokens, as if the
    text repeated itself. Worked example (the certain token is the last `b`):

        text   a b x a b        `a b` occurs at 0: copy from `x` on
        draft            x a b x a b

    Attributes:
      num_tokens: T, tokens drafted after the certain one.
      match: highest number of tokens that are searched for.
    """

    num_tokens: int
    match: int = 3

    @property
    def max_depth(self) -> int:
        """T + 1, with the certain token."""
        return self.num_tokens + 1

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """The root alone without a match, otherwise the draft."""
        return 1, self.max_nodes

    def look(self, view: View, arrays: None, memory: None) -> tuple[DraftTree, None]:
        """Searches the text; without a match only the root is valid."""
        positions = jnp.arange(view.tokens.shape[1])
        last = view.lengths[:, None]
        text = jnp.where(positions == last, view.next_token[:, None], view.tokens)
        # The length of the suffix of the text that ends at each position.
        matched = jnp.zeros_like(text)
        equal = positions < last
        for back in range(self.match):
            ending = jnp.take_along_axis(text, jnp.maximum(last - back, 0), axis=1)
            earlier = jnp.roll(text, back, axis=1)
            equal &= (earlier == ending) & (positions >= back)
            matched += equal
        best = matched.max(axis=1, keepdims=True)
        end = jnp.where(matched == best, positions, -1).max(axis=1, keepdims=True)
        period = jnp.maximum(last - end, 1)
        copied = end + 1 + jnp.arange(self.num_tokens) % period
        draft = jnp.take_along_axis(text, copied, axis=1, mode="clip")
        tokens = jnp.concatenate([view.next_token[:, None], draft], axis=1)
        chain = from_chain(tokens)
        valid = (chain.depths == 0) | (best > 0)
        return dataclasses.replace(chain, valid=valid), memory

    def propose(self, seen: DraftTree, arrays: PyTree) -> DraftTree:
        """Returns one chain per row."""
        return seen


@register
@dataclasses.dataclass(frozen=True)
class Lookup(StandalonePart):
    """Settings of the source `lookup`."""

    name = "lookup"
    title = "Prompt lookup of {tokens}"
    help = (
        "copies the tokens after the last occurrence of the end of the text; also with "
        "another source, as in heads/tree:32+lookup:8"
    )
    reference = "Saxena 2023"
    number_setting = "tokens"

    tokens: int = setting(8, "draft tokens", COUNT)
    match: int = setting(
        3, "tokens of the longest suffix that is searched for", integer(1, 32)
    )

    def build(self, context: BuildContext) -> PromptLookup:
        return PromptLookup(self.tokens, self.match)
