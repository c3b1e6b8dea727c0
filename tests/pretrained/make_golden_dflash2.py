"""Writes golden_drafters/dflash2, a tiny random drafter of DFlash2.

Its authors' code runs inside of inference servers only. The scores are computed here
from the published names and shapes, with loops in place of their tensor operations:

    PYTHONPATH=. python tests/pretrained/make_golden_dflash2.py
"""

import json

import torch
from safetensors.torch import save_file

from tests.pretrained.make_golden_drafters import (
    ANCHORS,
    GOLDEN,
    LAYERS,
    MASK,
    VOCABULARY,
    WIDTH,
    make_text,
    write_expected,
)

DFLASH2 = {
    "block_size": 4,
    "conv_kernel_size": 2,
    "conv_group_size": 4,
    "mask_token_id": MASK,
    "selector_rank": 3,
    "selector_top_k": 4,
    "target_layer_ids": [0, 2],
}


def main() -> None:
    """The layout of DFlash2: a moving window, convolutions and a selector."""
    torch.manual_seed(200)
    config = {key: value for key, value in LAYERS.items() if key != "layer_types"} | {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dflash_config": DFLASH2,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 5,
    }
    taps, rank = DFLASH2["conv_kernel_size"], DFLASH2["selector_rank"]
    groups = WIDTH // DFLASH2["conv_group_size"]
    shapes = {
        "fc.weight": (WIDTH, 2 * WIDTH),
        "hidden_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "candidate_selector.predecessor_codebook": (VOCABULARY, rank),
        "candidate_selector.successor_codebook": (VOCABULARY, rank),
        "candidate_selector.hidden_projection.weight": (rank, WIDTH),
    }
    for layer in range(2):
        parts = {
            "input_layernorm.weight": (WIDTH,),
            "post_attention_layernorm.weight": (WIDTH,),
            "self_attn.q_proj.weight": (16, WIDTH),
            "self_attn.k_proj.weight": (8, WIDTH),
            "self_attn.v_proj.weight": (8, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, 16),
            "self_attn.q_norm.weight": (4,),
            "self_attn.k_norm.weight": (4,),
            "mlp.gate_proj.weight": (12, WIDTH),
            "mlp.up_proj.weight": (12, WIDTH),
            "mlp.down_proj.weight": (WIDTH, 12),
        }
        for part in ("attention_conv", "mlp_conv"):
            parts[f"{part}.base_kernel"] = (2, taps, WIDTH)
            parts[f"{part}.kernel_projection.weight"] = (2 * taps * groups, WIDTH)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    w = {
        name: torch.randn(shape) * 0.4 + (name.endswith("norm.weight"))
        for name, shape in shapes.items()
    }
    embedding, softmax = torch.randn(2, VOCABULARY, WIDTH)
    text = make_text(2)
    logits = [
        dflash2_logits(w, text["features"][0], text["tokens"][0], a, embedding, softmax)
        for a in ANCHORS
    ]
    folder = GOLDEN / "dflash2"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(w, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_expected(
        folder,
        features=text["features"][0],
        tokens=text["tokens"][0],
        embedding=embedding,
        softmax=softmax,
        logits=torch.stack(logits),
    )


def dflash2_logits(w, features, tokens, anchor, embedding, softmax) -> torch.Tensor:
    """Scores `[L-1, V]` of all tokens after the true ones, loops instead of tensors."""
    size = DFLASH2["block_size"]

    def norm(x, name):
        square = x.pow(2).mean(-1, keepdim=True) + LAYERS["rms_norm_eps"]
        return x / square.sqrt() * w[name]

    def rotated(x, position):
        angles = position / 500.0 ** (torch.arange(2) * 2 / 4)
        cosine, sine = angles.cos().repeat(2), angles.sin().repeat(2)
        return x * cosine + torch.cat([-x[..., 2:], x[..., :2]], -1) * sine

    def heads(x, name, position, count):
        x = (w[f"{name}_proj.weight"] @ x).reshape(count, 4)
        return rotated(norm(x, f"{name}_norm.weight"), position)

    def around(z, prefix, side):
        """A function that mixes each position with the one before it."""
        base = w[f"{prefix}.base_kernel"][side]
        dynamic = (z @ w[f"{prefix}.kernel_projection.weight"].T).reshape(size, 2, 2, 2)

        def mix(x):
            rows = []
            for i in range(size):
                row = torch.zeros(WIDTH)
                for tap in range(min(i, 1) + 1):
                    kernel = base[tap] + dynamic[i, side, tap].repeat_interleave(4)
                    row = row + kernel * x[i - tap]
                rows.append(row)
            return torch.stack(rows)

        return mix

    fused = norm(features[:anchor] @ w["fc.weight"].T, "hidden_norm.weight")
    x = embedding[torch.tensor([tokens[anchor]] + [MASK] * (size - 1))]
    for layer in range(2):
        prefix = f"layers.{layer}"
        z = norm(x, f"{prefix}.input_layernorm.weight")
        conv, attention = f"{prefix}.attention_conv", f"{prefix}.self_attn"
        inputs = torch.cat([fused, around(z, conv, 0)(z)])
        keys = [heads(y, f"{attention}.k", p, 2) for p, y in enumerate(inputs)]
        values = [(w[f"{attention}.v_proj.weight"] @ y).reshape(2, 4) for y in inputs]
        mixed = []
        for position in range(anchor, anchor + size):
            queries = heads(inputs[position], f"{attention}.q", position, 4)
            near = range(max(position - 4, 0), anchor + size)  # The window is 5.
            rows = []
            for head, query in enumerate(queries):
                scores = torch.stack([query @ keys[p][head // 2] / 2 for p in near])
                weights = scores.softmax(0)
                rows.append(
                    sum(weights[i] * values[p][head // 2] for i, p in enumerate(near))
                )
            mixed.append(w[f"{attention}.o_proj.weight"] @ torch.cat(rows))
        x = x + around(z, conv, 1)(torch.stack(mixed))
        z, conv = (
            norm(x, f"{prefix}.post_attention_layernorm.weight"),
            f"{prefix}.mlp_conv",
        )
        inner = around(z, conv, 0)(z)
        gate = torch.nn.functional.silu(inner @ w[f"{prefix}.mlp.gate_proj.weight"].T)
        inner = gate * (inner @ w[f"{prefix}.mlp.up_proj.weight"].T)
        x = x + around(z, conv, 1)(inner @ w[f"{prefix}.mlp.down_proj.weight"].T)
    states = norm(x, "norm.weight")[1:]
    selector = "candidate_selector"
    previous = tokens[anchor : anchor + size - 1]
    factors = states @ w[f"{selector}.hidden_projection.weight"].T
    pairs = factors * w[f"{selector}.predecessor_codebook"][previous]
    return states @ softmax.T + pairs @ w[f"{selector}.successor_codebook"].T


if __name__ == "__main__":
    main()
