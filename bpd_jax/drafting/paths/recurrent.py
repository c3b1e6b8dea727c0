"""A trained recurrent network as second opinion on the heads' candidates (Domino)."""

import dataclasses

from bpd_jax.drafting.interface import View
from bpd_jax.drafting.paths.interface import Extension
from bpd_jax.drafting.tree import take
from bpd_jax.models.refiners import recurrent_scores, recurrent_start, recurrent_step
from bpd_jax.typing import Array, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class RecurrentScorer:
    """Corrections of the heads' logits that have read the path: a `PathScorer`.

    Attributes:
      params: of the recurrent refiner.
    """

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
    ) -> tuple[Float[Array, "B n R"], None]:
        """Reads the hidden state and the certain token."""
        state = recurrent_start(arrays, view.model.states(view.hidden))
        return recurrent_step(arrays, state, view.next_token)[:, None], memory

    def scores(
        self,
        arrays: Params,
        state: Float[Array, "B n R"],
        level: int,
        tokens: Int[Array, "B n W"],
    ) -> Float[Array, "B n W"]:
        """Corrections of the logits."""
        return recurrent_scores(arrays, state, tokens, level)

    def extend(
        self,
        arrays: Params,
        state: Float[Array, "B n R"],
        level: int,
        extension: Extension,
    ) -> Float[Array, "B n R"]:
        """Reads the new paths' last tokens."""
        del level
        return recurrent_step(arrays, take(state, extension.parents), extension.tokens)
