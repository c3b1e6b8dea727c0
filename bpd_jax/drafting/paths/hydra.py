"""Sequential heads: each takes the draft's earlier tokens as input (Hydra)."""

import dataclasses

import flax.struct
import jax.numpy as jnp

from bpd_jax.drafting.interface import BoundModel, View
from bpd_jax.drafting.paths.interface import Candidates, Extension
from bpd_jax.drafting.tree import take
from bpd_jax.models.functions import top_candidates
from bpd_jax.models.refiners import HydraConfig, hydra_states
from bpd_jax.typing import Array, Float, Int, Params


@flax.struct.dataclass
class HydraState:
    """What the heads read at the ends of n paths of l tokens.

    Attributes:
      model: whose embeddings they read, and whose softmax reads them.
      hidden: final hidden state of the text's last token.
      embedded: embeddings of the tokens of each path.
    """

    model: BoundModel
    hidden: Float[Array, "B D"]
    embedded: Float[Array, "B n l D"]


@dataclasses.dataclass(frozen=True)
class HydraPaths:
    """Candidates are the best tokens of a Hydra head (Ankner et al. 2024).

    Attributes:
      block_size: L, at most the number of heads trained.
      width: W, tokens kept of each distribution.
      config: sizes of the heads.
      params: their parameters.
    """

    block_size: int
    width: int
    config: HydraConfig
    params: Params = dataclasses.field(compare=False)

    @property
    def arrays(self) -> Params:
        """The parameters."""
        return self.params

    def remember(
        self, arrays: Params, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> None:
        """Nothing: the hidden state holds what there is to know of the text."""
        del arrays, tokens, lengths

    def start(
        self, view: View, arrays: Params, memory: None
    ) -> tuple[HydraState, None]:
        """Embeds the certain token."""
        del arrays
        embedded = view.model.embed(view.next_token)[:, None, None]
        hidden = view.model.states(view.hidden)
        return HydraState(view.model, hidden, embedded), memory

    def candidates(self, arrays: Params, state: HydraState, level: int) -> Candidates:
        """The best tokens, with their log-probabilities."""
        states = hydra_states(self.config, arrays, state.hidden, state.embedded, level)
        logits = state.model.draft_logits(states, level)
        places, log_probs, _ = top_candidates(logits, self.width)
        return Candidates(state.model.draft_tokens(places), log_probs)

    def extend(
        self, arrays: Params, state: HydraState, level: int, extension: Extension
    ) -> HydraState:
        """Appends the embeddings of the new paths' last tokens."""
        del arrays, level
        last = state.model.embed(extension.tokens)[:, :, None]
        before = take(state.embedded, extension.parents)
        embedded = jnp.concatenate([before, last], axis=2)
        return dataclasses.replace(state, embedded=embedded)

    def entropies(self, state: HydraState) -> None:
        """Those of the later heads depend on the path."""
        del state
