"""The source `auto`, which stands for another method until it is chosen."""

import dataclasses
from typing import ClassVar

from bpd_jax.base.errors import UserError
from bpd_jax.drafting.interface import Drafter
from bpd_jax.drafting.parts import BuildContext, StandalonePart, register


@register
@dataclasses.dataclass(frozen=True)
class Auto(StandalonePart):
    """The source `auto`."""

    name: ClassVar[str] = "auto"
    title: ClassVar[str] = "Automatic"
    help: ClassVar[str] = "the fastest method on this device, by measurement"

    def build(self, context: BuildContext) -> Drafter:
        """Raises a `UserError`: it has to be replaced by its choice."""
        raise UserError(
            "auto is not a method by itself: name a method, or let decode or generate "
            "measure which method is fastest (choose_method)."
        )
