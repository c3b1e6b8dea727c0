"""Writes golden_drafters/dflash2, a tiny random drafter of DFlash2.

It is run by its authors' class `DFlash2DraftModel` (z-lab/dflash on GitHub from commit
1012959 on; the other folders are of an earlier one):

    PYTHONPATH=. python scripts/golden/dflash2.py --dflash=FOLDER
"""

import argparse
import importlib.util
import json
import pathlib

import torch
import transformers
from safetensors.torch import save_file

from scripts.golden.drafters import (
    ANCHORS,
    GOLDEN,
    LAYERS,
    MASK,
    VOCABULARY,
    WIDTH,
    make_text,
    randomize,
    write_expected,
)

BLOCK = 4
CONFIG = {
    **LAYERS,
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "dflash_config": {
        "block_size": BLOCK,
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "mask_token_id": MASK,
        "selector_rank": 3,
        "selector_top_k": 4,
        "target_layer_ids": [0, 2],
    },
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 5,
    "use_sliding_window": True,
}


def main() -> None:
    """The layout of DFlash2: a moving window, convolutions and a selector."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dflash", type=pathlib.Path, required=True)
    path = parser.parse_args().dflash / "dflash" / "model.py"
    spec = importlib.util.spec_from_file_location("dflash_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(200)
    fields = {key: CONFIG[key] for key in CONFIG.keys() - {"model_type"}}
    model = module.DFlash2DraftModel(transformers.Qwen3Config(**fields)).eval()
    randomize(model)
    embedding, softmax = torch.randn(2, VOCABULARY, WIDTH)
    text = make_text(2)
    with torch.no_grad():
        logits = [
            scores(model, text["features"], text["tokens"], a, embedding, softmax)
            for a in ANCHORS
        ]
    folder = GOLDEN / "dflash2"
    folder.mkdir(parents=True, exist_ok=True)
    # Published files name these two tables without `.weight`.
    tensors = {
        name.replace("codebook.weight", "codebook"): value
        for name, value in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    write_expected(
        folder,
        features=text["features"][0],
        tokens=text["tokens"][0],
        embedding=embedding,
        softmax=softmax,
        logits=torch.stack(logits),
    )


def scores(model, features, tokens, anchor, embedding, softmax) -> torch.Tensor:
    """Scores `[L-1, V]` of all tokens after the true ones.

    The class scores the best tokens of a position alone; `propose`, which does, has to
    choose the best of these scores after its own choices.
    """
    block = torch.tensor([tokens[0, anchor]] + [MASK] * (BLOCK - 1))
    states = model(
        target_hidden=features[:, :anchor],
        noise_embedding=embedding[block][None],
        position_ids=torch.arange(anchor + BLOCK)[None],
    )[:, 1:]

    def head(states):
        return states @ softmax.T

    selector = model.candidate_selector

    def corrected(previous):
        """Scores after the tokens `[L-1]`."""
        factors = selector.hidden_projection(states[0])
        pairs = factors * selector.predecessor_codebook(previous)
        unary = model.compute_logits(states, head)[0]
        return unary + pairs @ selector.successor_codebook.weight.T

    selector.top_k = VOCABULARY
    first = tokens[:, anchor]
    (path,), *_ = model.propose(states, first, head, 0.0)
    assert corrected(torch.cat([first, path[:-1]])).argmax(-1).equal(path)
    return corrected(tokens[0, anchor : anchor + BLOCK - 1])


if __name__ == "__main__":
    main()
