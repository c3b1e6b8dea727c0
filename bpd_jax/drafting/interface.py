"""What the decode loop and a drafting method say to each other.

A method proposes in two halves. `look` runs on the device, inside the jitted step,
where the model is at hand. `propose` turns what it saw into a draft tree: on the
device too if `on_device`, else on the host with numpy arrays. The loop joins the
halves; it knows where a method runs and nothing else about it.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

from bpd_jax.drafting.lattice import Drafts, Lattice
from bpd_jax.drafting.tree import DraftTree
from bpd_jax.typing import AnyArray, Array, Float, Int, PyTree


@dataclasses.dataclass(frozen=True)
class View:
    """What a drafter may look at before a serial call.

    Attributes:
      tokens: prompt and text so far; row b holds `lengths[b]` tokens.
      lengths: of the text.
      next_token: the model's own next token, which is certain.
      hidden: final hidden state of the last accepted token.
      head_logits: gives the logits of all heads for hidden states.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    next_token: Int[Array, " B"]
    hidden: Float[Array, "B D"]
    head_logits: Callable[[Float[Array, "B D"]], Float[Array, "B L V"]]


class Drafter(Protocol):
    """A drafting method. Implementations are frozen dataclasses, hence jit-static."""

    @property
    def on_device(self) -> bool:
        """Whether `propose` can be traced."""
        ...

    @property
    def max_depth(self) -> int:
        """The most tokens that one of its drafts holds."""
        ...

    def look(self, view: View, draft_state: PyTree) -> PyTree:
        """Device half: collects what `propose` needs, as arrays."""
        ...

    def propose(self, seen: PyTree) -> DraftTree:
        """Second half: the drafts that the next serial call checks."""
        ...


class Rescorer(Protocol):
    """Refines a lattice into P drafts (paper section 7)."""

    @property
    def on_device(self) -> bool:
        """Whether `refine` can be traced."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens of text before the block that `refine` wants to see."""
        ...

    @property
    def arrays(self) -> PyTree:
        """What `refine` reads on the device besides its arguments, or None."""
        ...

    def refine(
        self, lattice: Lattice, context: Int[AnyArray, "B C"], arrays: PyTree
    ) -> Drafts:
        """The P best distinct drafts.

        Args:
          lattice: candidates of the block.
          context: the last C tokens of the text, -1 before its beginning.
          arrays: `self.arrays`. The loop hands them over, so that jitted code takes
            them as an argument and not as a constant.
        """
        ...
