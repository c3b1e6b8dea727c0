"""Greedy decoding of the same weights by Hugging Face transformers.

`benchmarks.autoregressive` starts this script with an interpreter that has torch and
transformers, as `PYTHON benchmarks/autoregressive_transformers.py WEIGHTS.npz`. It
reads one JSON request per line, `{"way": ..., "prompt": [...], "new_tokens": N}`, and
answers each with a line `{"seconds": ..., "tokens": [...]}`. The ways are `generate`,
the library's own loop, and `forward`, the least that a loop around the model can do;
`versions` answers with those of both libraries.
"""

import json
import os
import sys
import time

import numpy as np
import torch
import transformers

_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}


def state_dict(weights: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """bpd_jax's parameters by path, under the names and shapes of GPT-2."""
    trunk = {path.removeprefix("trunk/"): a for path, a in weights.items()}
    width = trunk["embedding"].shape[1]
    found = {
        "transformer.wte.weight": trunk["embedding"],
        "lm_head.weight": trunk["embedding"],
        "transformer.wpe.weight": trunk["position_embedding"],
        "transformer.ln_f.weight": trunk["final_norm/scale"],
        "transformer.ln_f.bias": trunk["final_norm/bias"],
    }
    layers = sum(path.endswith("query/kernel") for path in trunk)
    for i in range(layers):
        block = f"transformer.h.{i}"
        parts = [f"attention_{i}/{name}" for name in ("query", "key", "value")]
        found |= {
            f"{block}.attn.c_attn.weight": np.concatenate(
                [trunk[f"{part}/kernel"].reshape(width, width) for part in parts], 1
            ),
            f"{block}.attn.c_attn.bias": np.concatenate(
                [trunk[f"{part}/bias"].reshape(width) for part in parts]
            ),
            f"{block}.attn.c_proj.weight": trunk[
                f"attention_{i}/output/kernel"
            ].reshape(width, width),
            f"{block}.attn.c_proj.bias": trunk[f"attention_{i}/output/bias"],
            f"{block}.mlp.c_fc.weight": trunk[f"mlp_{i}/input/kernel"],
            f"{block}.mlp.c_fc.bias": trunk[f"mlp_{i}/input/bias"],
            f"{block}.mlp.c_proj.weight": trunk[f"mlp_{i}/output/kernel"],
            f"{block}.mlp.c_proj.bias": trunk[f"mlp_{i}/output/bias"],
        }
        for ours, theirs in _NORMS.items():
            found[f"{block}.{theirs}.weight"] = trunk[f"{ours}_{i}/scale"]
            found[f"{block}.{theirs}.bias"] = trunk[f"{ours}_{i}/bias"]
    return {name: torch.from_numpy(np.array(a)) for name, a in found.items()}


def load_model(path: str) -> transformers.GPT2LMHeadModel:
    """A GPT-2 of the file's sizes with the file's weights."""
    with np.load(path) as file:
        weights = dict(file)
    vocab_size, width = weights["trunk/embedding"].shape
    layers = sum(name.endswith("query/kernel") for name in weights)
    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=weights["trunk/position_embedding"].shape[0],
        n_embd=width,
        n_layer=layers,
        n_head=weights["trunk/attention_0/query/kernel"].shape[1],
        n_inner=weights["trunk/mlp_0/input/kernel"].shape[1],
        # No end-of-text token: every request decodes all its tokens.
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.load_state_dict(state_dict(weights))
    return model.eval()


def by_generate(
    model: transformers.GPT2LMHeadModel, prompt: torch.Tensor, new_tokens: int
) -> list[int]:
    """The library's own greedy loop."""
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    return output[0, prompt.shape[1] :].tolist()


def by_forward(
    model: transformers.GPT2LMHeadModel, prompt: torch.Tensor, new_tokens: int
) -> list[int]:
    """One forward pass per token and an argmax, nothing else."""
    tokens, cache, chosen = prompt, None, []
    for _ in range(new_tokens):
        output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        chosen.append(tokens)
    return torch.cat(chosen, 1)[0].tolist()


WAYS = {"generate": by_generate, "forward": by_forward}


def main() -> None:
    """Answers requests until standard input ends."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = load_model(sys.argv[1])
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for line in sys.stdin:
        request = json.loads(line)
        if request["way"] == "versions":
            print(json.dumps(versions), flush=True)
            continue
        prompt = torch.tensor([request["prompt"]])
        start = time.perf_counter()
        with torch.inference_mode():
            tokens = WAYS[request["way"]](model, prompt, request["new_tokens"])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
