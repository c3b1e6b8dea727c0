"""The layouts in which other engines store Medusa heads (Cai et al. 2024).

Their heads count from 0, and head i predicts the token i + 2 steps ahead. In bpd_jax
heads count from 1, and head 1 is the model itself, so their head i is head i + 2 here.
Its state is x after layers x ← x + SiLU(W x + b), where W is stored as [out, in], here
as [in, out]; its logits are the product with the rows of a softmax matrix.

FasterDecoding, who first published such heads, use two versions. In the first every
head has its own softmax; in the second all heads use the model's softmax, which is not
stored. Their later checkpoints contain base and heads together, with names that begin
with `medusa_head.`. vLLM can share one softmax as well, but reads it from the file
(`original_lm_head` in config.json), and supports draft vocabularies (`token_map`).
"""

import dataclasses

from bpd_jax.base.errors import UserError
from bpd_jax.models.blockwise_config import BlockHeadsConfig

TOKEN_MAP = "token_map"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names of one layout, where heads and layers count from 0.

    Attributes:
      name: name of the layout.
      file: name of the file of tensors.
      layer: pattern of the names of a layer's tensors; `part` is `weight` or `bias`.
      softmax: pattern of the names of a head's softmax; `layers` is the number of
        layers.
    """

    name: str
    file: str
    layer: str
    softmax: str

    def layer_name(self, head: int, layer: int, part: str) -> str:
        """Name of the weight or the bias of a layer."""
        return self.layer.format(head=head, layer=layer, part=part)

    def softmax_name(self, head: int, layers: int) -> str:
        """Name of the softmax of a head with `layers` layers."""
        return self.softmax.format(head=head, layers=layers)


VLLM = Layout(
    "vllm",
    "model.safetensors",
    "blocks.{head}.layers.{layer}.{part}",
    "lm_heads.{head}.weight",
)
MEDUSA = Layout(
    "medusa",
    "medusa_lm_head.safetensors",
    "{head}.{layer}.linear.{part}",
    "{head}.{layers}.weight",
)
LAYOUTS = {layout.name: layout for layout in (VLLM, MEDUSA)}


def check_exportable(heads: BlockHeadsConfig | None, layout: Layout) -> None:
    """Checks that other engines can run the heads.

    Raises:
      UserError: they cannot, or there are no heads.
    """
    if heads is None or heads.num_heads < 2:
        raise UserError(
            "the model has no block heads to export: give a folder with --heads."
        )
    same = BlockHeadsConfig(
        heads.num_heads,
        kind="medusa",
        layers=heads.layers,
        own_softmax=heads.own_softmax,
        draft_vocabulary=heads.draft_vocabulary,
    )
    wrong = [
        f"{field.name} = {getattr(heads, field.name)!r}"
        for field in dataclasses.fields(heads)
        if getattr(heads, field.name) != getattr(same, field.name)
    ]
    if wrong:
        raise UserError(
            "these heads cannot be exported: other engines support only Medusa heads, "
            "x + SiLU(W x + b) with a square W and no layer for head 1, but these have "
            f"{', '.join(wrong)}; train heads of kind medusa."
        )
    if heads.own_softmax and heads.draft_vocabulary is not None:
        raise UserError(
            "heads with both a draft vocabulary and a softmax of their own cannot be "
            f"exported to the layout {layout.name}: train them with only one of the "
            "two."
        )
