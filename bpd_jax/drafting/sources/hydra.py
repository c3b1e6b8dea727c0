"""Hydra heads, which also read the previous tokens of the draft."""

import dataclasses

import flax.struct
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Params
from bpd_jax.drafting.draft_tree import take
from bpd_jax.drafting.interface import Candidates, Extension, Source, View
from bpd_jax.drafting.parts import BuildContext, SearchPart, register
from bpd_jax.drafting.sources.heads import Heads, HeadsPart
from bpd_jax.models.attachment_files import LoadedRefiner
from bpd_jax.models.candidates import top_candidates
from bpd_jax.models.decoded_model import DecodedModel
from bpd_jax.models.trained_refiners import HydraConfig, hydra_states


@flax.struct.dataclass
class HydraState:
    """The inputs of the heads after n paths of l tokens.

    Attributes:
      model: the model, for its embedding and softmax.
      hidden: final hidden state of the last token of the text.
      embedded: embeddings of the tokens of each path.
    """

    model: DecodedModel
    hidden: Float[Array, "B D"]
    embedded: Float[Array, "B n l D"]


@dataclasses.dataclass(frozen=True)
class HydraSource(Source):
    """The W best tokens of a Hydra head (Ankner et al. 2024).

    Attributes:
      block_size: L, at most the number of trained heads.
      width: W, candidates per head.
    """

    block_size: int
    width: int
    config: HydraConfig
    arrays: Params = dataclasses.field(compare=False)

    def start(
        self, view: View, arrays: Params, memory: None
    ) -> tuple[HydraState, None]:
        """Embeds the certain token."""
        embedded = view.model.embed(view.next_token)[:, None, None]
        hidden = view.model.states(view.hidden)
        return HydraState(view.model, hidden, embedded), memory

    def candidates(self, arrays: Params, state: HydraState, level: int) -> Candidates:
        """The best tokens, with their log-probabilities."""
        states = hydra_states(self.config, arrays, state.hidden, state.embedded, level)
        logits = state.model.draft_logits(states, level)
        indices, log_probs, _ = top_candidates(logits, self.width)
        return Candidates(state.model.draft_tokens(indices), log_probs)

    def extend(
        self, arrays: Params, state: HydraState, level: int, extension: Extension
    ) -> HydraState:
        """Appends the embeddings of the new paths' last tokens."""
        last = state.model.embed(extension.tokens)[:, :, None]
        before = take(state.embedded, extension.parents)
        embedded = jnp.concatenate([before, last], axis=2)
        return dataclasses.replace(state, embedded=embedded)


@register
@dataclasses.dataclass(frozen=True)
class Hydra(HeadsPart):
    """The source `hydra`."""

    name = "hydra"
    title = "Hydra"
    help = "heads that see the earlier tokens of the draft"
    reference = "Ankner et al. 2024"
    needs = ("hydra",)
    needs_hidden = True

    def build(self, context: BuildContext, search: SearchPart) -> HydraSource:
        """Builds the source, which has as many heads as the model."""
        sizes = Heads(self.heads, self.k).build(context, search)
        refiner: LoadedRefiner = context.need(self.name)
        assert isinstance(refiner.config, HydraConfig)
        return HydraSource(
            sizes.block_size, sizes.width, refiner.config, refiner.params
        )
