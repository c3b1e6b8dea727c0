"""The formula behind the paper's Table 11, recovered from its cells.

`printed_cost` reproduces all 42 cells to the last digit. The corrected formula is
`bpd_jax.evaluation.token_cost.cost`. They differ as follows:

- The paper uses the width of the feed-forward layer as that of keys and values: its
  cache traffic is 12288 / 1536 = 8 times too large. (For the rescorer it uses 1536,
  4 times the model's width of 384; with attention heads of width 128, the reading that
  gives 61M parameters, 1536 would be correct.)
- In the paper the rescorer is read once per serial call, as in the parallel reading of
  Algorithm 2. In the sequential one each of L - 1 = 8 steps reads it again: 2.306 GB of
  parameters per token, compared with 1.823 GB for plain BPD.
- In the paper the weights are multiplied by one token per call, 2 FLOPs each,
  regardless of the number of draft tokens, and attention is recomputed for all pairs of
  positions, at 8 FLOPs per layer, pair and unit of width: twice the cost of scores and
  weighted sums. The second term is 99.7 % of the 0.931 T of autoregressive decoding.
- The paper includes the block heads' parameters in autoregressive decoding.
"""

import functools

from bpd_jax.evaluation.token_cost import Cost, ModelSize, model_size
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.transformer_config import TransformerConfig

CONTEXTS = (128, 512, 1024, 2048)
"""Lengths of the prefix in tokens for which Table 11 gives cache traffic."""


@functools.cache
def paper_sizes() -> tuple[ModelSize, ModelSize]:
    """The paper's 1.5B model and 61M rescorer, as their sizes are read here.

    A gated trunk and eight further heads of width 12288 have 1.57e9 parameters; a
    rescorer with attention heads of width 128 has 62.7e6.
    """
    trunk = TransformerConfig(50257, 18, 1536, 12288, num_heads=12, gated=True)
    rescorer = TransformerConfig(50257, 12, 384, 1536, num_heads=12, head_dim=128)
    return (
        model_size(BlockwiseConfig(trunk, BlockHeadsConfig(9, hidden=12288))),
        model_size(BlockwiseConfig(rescorer)),
    )


def printed_cost(
    efficiency: float, context: int, *, drafts: int = 0, passes: int = 0
) -> Cost:
    """The formula of Table 11 for the paper's 1.5B model and 61M rescorer.

    Per token, with S the context, p the drafts, BE the block efficiency and
    m = S + 9 p the positions of a call:

        parameters   2 · 1.5e9                  + 2 · 61e6 · n
        cache        2 · 18 · 12288 · 2 · m     + 2 · 12 · 1536 · 2 · (S n + 9)
        FLOPs        2 · 1.5e9 + 8 · 18 · 1536 · m²
                                                + (2 · 61e6 + 8 · 12 · 384 · (S + 9)²) n

    divided by BE, in bytes and FLOPs. The right-hand terms are for neural rescoring
    only, where the table has n = 1. The table prints FLOPs for S = 2048, and divides by
    the printed block efficiency, which has three decimals.

    Args:
      efficiency: mean block efficiency over the seven tasks; 1 for autoregressive
        decoding.
      context: S, in tokens.
      drafts: p; 0 for autoregressive decoding.
      passes: n, number of times that a call reads the rescorer; 0 without one.
    """
    positions = context + 9 * drafts
    parameters = 2 * 1.5e9
    kv = 2 * 18 * 12288 * 2.0 * positions
    flops = 2 * 1.5e9 + 8 * 18 * 1536 * positions**2
    if passes:
        parameters += 2 * 61e6 * passes
        kv += 2 * 12 * 1536 * 2.0 * (context * passes + 9)
        flops += (2 * 61e6 + 8 * 12 * 384 * (context + 9) ** 2) * passes
    return Cost(parameters / efficiency, kv / efficiency, flops / efficiency)
