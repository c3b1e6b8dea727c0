"""Writes golden_drafters/eagle3*: tiny random EAGLE-3 drafters, run by speculators.

pip install torch transformers speculators==0.9.0
PYTHONPATH=. python scripts/golden/eagle.py
"""

import json
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file

from scripts.golden.drafters import (
    GOLDEN,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    make_text,
    randomize,
    write,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Changes of the layer, fields, and whether the layout is that of the authors.
EAGLES = {
    "eagle3_speculators": (
        {"attention_bias": True},
        {"draft_vocab_size": 9, "norm_before_fc": True},
    ),
    "eagle3_1": (
        {"model_type": "qwen3", "rope_parameters": YARN},
        {
            "draft_vocab_size": VOCABULARY,
            "fc_norm": True,
            "norm_output": True,
            "norm_before_residual": True,
        },
    ),
    "eagle3": ({}, {"draft_vocab_size": 9}),
}
STEPS = 3


def eagle_drafter(name: str) -> None:
    """An EAGLE-3 drafter, run by speculators; `eagle3` has the layout of the authors.

    Its `logits` are `[steps, T - 1, V']`: those of step k at i are after the tokens up
    to i + 1 + k, of which the last k are drafted.
    """
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    changes, fields = EAGLES[name]
    layers = {**LAYERS, "num_hidden_layers": 1, **changes}
    del layers["layer_types"]
    kind = layers.pop("model_type", "llama")
    inner = transformers.AutoConfig.for_model(kind, **layers)
    inner._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=inner,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=2)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **fields,
    )
    model = Eagle3DraftModel(config).eval()
    randomize(model)
    embedding, softmax = torch.randn(2, VOCABULARY, WIDTH)
    model.embed_tokens.weight.data.copy_(embedding)
    if model.use_draft_vocab:
        rows = torch.randperm(VOCABULARY)[: model.draft_vocab_size].sort().values
        members = torch.zeros(VOCABULARY, dtype=torch.bool)
        members[rows] = True
        model.load_vocab_mappings(members, rows - torch.arange(len(rows)))
    text, captured = make_text(3), []

    def capture(logits, *others, **options):
        del others, options
        captured.append(logits[0])
        return torch.zeros(()), {}

    module = "speculators.models.eagle3.core.compute_metrics"
    with torch.no_grad(), mock.patch(module, capture):
        model(
            hidden_states=text["features"][:, :-1],
            input_ids=text["tokens"][:, 1:],
            document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, LENGTH - 1, WIDTH),
            ttt_steps=STEPS,
        )
    folder = GOLDEN / name
    write(
        folder,
        model,
        features=text["features"][0],
        tokens=text["tokens"][0],
        embedding=embedding,
        softmax=softmax,
        logits=torch.stack(captured),
    )
    if name == "eagle3":
        tensors = {
            key.replace("layers.0.", "midlayer."): value.contiguous()
            for key, value in model.state_dict().items()
            if not key.startswith(("verifier_", "embed_tokens"))
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        flat = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **layers,
            "draft_vocab_size": 9,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        }
        (folder / "config.json").write_text(json.dumps(flat, indent=2) + "\n")


if __name__ == "__main__":
    for number, name in enumerate(EAGLES):
        torch.manual_seed(201 + number)
        eagle_drafter(name)
