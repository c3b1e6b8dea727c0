"""The layouts in which other libraries store block drafters (DFlash, DFlash2, DSpark).

Two layouts are in use, with the same names of tensors:

- that of the library `speculators`, whose config.json has `speculators_model_type`
  (`dflash` or `dspark`) and describes the layers in `transformer_layer_config`;
- that of the authors, whose config.json is that of a Qwen3 model with more fields:
  `dflash_config` in z-lab's DFlash and DFlash2, fields at the top level in DeepSpec's
  DSpark.

They count differently from bpd_jax:

- `block_size` is the number of queries Q. DSpark predicts at the anchor as well
  (`sample_from_anchor`), so L is Q + 1; in DFlash L is Q.
- Layers of the target: `aux_hidden_state_layer_ids` of speculators counts the embedding
  as 0, so id i is layer i - 1 here. `target_layer_ids` counts layers from 0, as here,
  and -1 is the embedding.
- The mask embedding is the embedding of the token `mask_token_id`, in the drafter's own
  `embed_tokens` if there is one, else in the target's. (If that token is the certain
  token, bpd_jax uses the target's embedding.)
- `d2t[i]` of a draft vocabulary is the distance from i to the token id.

Matrices are [output, input]; here they are [input, …, output].
"""

import numpy as np

from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.pretrained.llama_layout import Origin, llama_layer

TYPE = "speculators_model_type"

EMBEDDING = "embed_tokens.weight"
SOFTMAX = "lm_head.weight"
DRAFT_TO_TARGET = "d2t"
TARGET_IN_DRAFT = "t2d"
CONFIDENCE = "confidence_head.proj.weight"

# Tensors that drafting does not use: targets of training, rotary frequencies.
UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")


def drafter_layout(
    config: BlockDrafterConfig, target: TransformerConfig
) -> dict[str, Origin]:
    """The tensors of a block drafter, by the paths of its parameters.

    The mask embedding and the frozen parameters are not included.

    Args:
      config: configuration of the drafter.
      target: trunk of the target model.
    """
    layers = config.transformer(target)
    width, rank = layers.d_model, config.markov_rank
    inputs, taps = len(config.feature_layers) * width, config.convolution_taps
    layout = {
        "fusion/kernel": Origin("fc.weight", (width, inputs), np.transpose),
        "fusion_norm/scale": Origin("hidden_norm.weight", (width,)),
        "final_norm/scale": Origin("norm.weight", (width,)),
    }
    for layer in range(config.num_layers):
        for path, origin in llama_layer(layers, layer).items():
            name = origin.name.removeprefix("model.")
            layout["/".join(path)] = Origin(name, origin.shape, origin.convert)
        for part in ("attention", "mlp") if taps else ():
            own, name = f"{part}_convolution_{layer}", f"layers.{layer}.{part}_conv"
            shape = (2 * taps * (width // config.convolution_group), width)
            layout[f"{own}/base"] = Origin(f"{name}.base_kernel", (2, taps, width))
            layout[f"{own}/dynamic/kernel"] = Origin(
                f"{name}.kernel_projection.weight", shape, np.transpose
            )
    if rank:
        outputs = config.draft_vocabulary or target.vocab_size
        head = "markov_head.markov_w{}.weight"
        embedding, output = head.format(1), head.format(2)
        if config.markov_reads_state:
            head = "candidate_selector.{}"
            embedding = head.format("predecessor_codebook")
            output = head.format("successor_codebook")
            layout["markov/project"] = Origin(
                head.format("hidden_projection.weight"), (rank, width), np.transpose
            )
        layout["markov/embedding"] = Origin(embedding, (target.vocab_size, rank))
        layout["markov/output"] = Origin(output, (outputs, rank))
    if config.confidence:
        read = width + (rank if config.confidence_reads_markov else 0)
        layout["confidence/kernel"] = Origin(CONFIDENCE, (1, read), np.transpose)
        layout["confidence/bias"] = Origin("confidence_head.proj.bias", (1,))
    return layout
