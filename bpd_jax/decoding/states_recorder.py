"""Keeps the model's states while it writes texts, for the training of heads on them."""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int, PyTree
from bpd_jax.drafting.interface import Outcome, Prompts, View
from bpd_jax.drafting.wrapped import WrappedDrafter
from bpd_jax.models.cache import write_rows


@flax.struct.dataclass
class RecordedStates:
    """The memory of a `StatesRecorder`.

    Attributes:
      states: the final hidden state and the outputs of the layers after every token of
        the text; arbitrary from `lengths` on.
      lengths: lengths of the texts.
    """

    drafter: PyTree
    states: Float[Array, "B S C"]
    lengths: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class StatesRecorder(WrappedDrafter):
    """A drafter that drafts as another one does, and keeps the model's states.

    The passes of decoding compute them anyway; training would run the model over the
    texts once more.

    Attributes:
      layers: layers whose outputs are kept beside the final hidden states.
      slots: S, at least the slots of the longest text.
      dtype: of the kept states.
    """

    layers: tuple[int, ...]
    slots: int
    dtype: Any

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers that are kept, then those that the drafter reads."""
        return (*self.layers, *self.inner.feature_layers)

    def start(self, arrays: PyTree, prompts: Prompts) -> RecordedStates:
        """Keeps the states of the prompts."""
        kept, read = self._split(prompts.features, prompts.hidden)
        batch, length, width = kept.shape
        states = jnp.zeros((batch, self.slots, width), self.dtype)
        memory = self.inner.start(arrays, dataclasses.replace(prompts, features=read))
        return RecordedStates(
            memory, states.at[:, :length].set(kept), jnp.asarray(prompts.lengths)
        )

    def look(
        self, view: View, arrays: PyTree, memory: RecordedStates
    ) -> tuple[PyTree, RecordedStates]:
        seen, drafter = self.inner.look(view, arrays, memory.drafter)
        return seen, dataclasses.replace(memory, drafter=drafter)

    def learn(
        self, arrays: PyTree, memory: RecordedStates, outcome: Outcome
    ) -> RecordedStates:
        """Keeps the states of the accepted tokens."""
        kept, read = self._split(outcome.features, outcome.hidden)
        drafter = self.inner.learn(
            arrays, memory.drafter, dataclasses.replace(outcome, features=read)
        )
        return RecordedStates(
            drafter,
            write_rows(memory.states, kept, memory.lengths),
            memory.lengths + outcome.count,
        )

    def _split(
        self, features: Float[Array, "B T F"], hidden: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B T G"]]:
        """The states to keep, and the features that the drafter reads."""
        width = len(self.layers) * hidden.shape[-1]
        kept = jnp.concatenate([hidden, features[..., :width]], axis=-1)
        return kept.astype(self.dtype), features[..., width:]
