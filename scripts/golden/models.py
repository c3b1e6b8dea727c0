"""Rewrites tests/formats/golden/: tiny random models with logits.

The logits are those of transformers. It needs an environment with torch and
transformers, which the tests do not:

    pip install torch transformers
    python scripts/golden/models.py [NAME …]

Every folder is a model as `save_pretrained` writes it, with a tokenizer of one word
per token, and `expected.npz`: a text and the logits after each of its tokens, float32.
A model is described by the config.json in its folder, which is all that a new one
needs; its text has 40 tokens. `rotary.json` has the frequencies of published
configurations, computed from their `rope_parameters`.
"""

import json
import pathlib
import sys

import numpy as np
import tokenizers
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "formats" / "golden"
VOCABULARY = 40


def make_model(folder: pathlib.Path) -> tuple[torch.nn.Module, torch.dtype]:
    """A model without parameters that are zero or one, so that each has an effect.

    Its values are exact in the dtype of its configuration, which is returned too.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    dtype, config.dtype = config.dtype, torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        mean = 0.0 if parameter.ndim > 1 else float(parameter.detach().mean() > 0.5)
        with torch.no_grad():
            parameter.normal_(mean, 0.3)
            parameter.copy_(parameter.to(dtype).float())
    return model, dtype


def write_tokenizer(folder: pathlib.Path) -> None:
    """One word per token: `<s>`, `</s>`, w2, w3, …; every text begins with `<s>`."""
    words = ["<s>", "</s>", *(f"w{i}" for i in range(2, VOCABULARY))]
    vocabulary = {word: token for token, word in enumerate(words)}
    model = tokenizers.models.WordLevel(vocabulary, "w2")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


def write_model(name: str) -> None:
    """Writes one folder."""
    folder, length = GOLDEN / name, VOCABULARY
    if (folder / "expected.npz").exists():
        length = len(np.load(folder / "expected.npz")["tokens"])
    torch.manual_seed(len(name))
    model, dtype = make_model(folder)
    tokens = torch.randint(0, VOCABULARY, (1, length))
    with torch.no_grad():
        logits = model(tokens).logits[0]
    model.to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(folder)
    np.savez(
        folder / "expected.npz",
        tokens=tokens[0].numpy().astype(np.int32),
        logits=logits.numpy(),
    )


def rotary_frequencies(parameters: dict) -> dict:
    """The frequencies that transformers computes for heads of width 64."""
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    if parameters["rope_type"] == "default":
        embedding = LlamaRotaryEmbedding(config)
        frequencies, factor = embedding.inv_freq, embedding.attention_scaling
    else:
        make = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        frequencies, factor = make(config, torch.device("cpu"))
    return {
        "rope_parameters": parameters,
        "frequencies": [float(f"{f:.8g}") for f in frequencies.tolist()],
        "attention_factor": factor,
    }


def main() -> None:
    """Rewrites all folders, or those of the given names."""
    folders = [path.parent.name for path in sorted(GOLDEN.glob("*/config.json"))]
    for name in sys.argv[1:] or folders:
        write_model(name)
    path = GOLDEN / "rotary.json"
    rotary = {
        name: rotary_frequencies(values["rope_parameters"])
        for name, values in json.loads(path.read_text()).items()
    }
    path.write_text(json.dumps(rotary, indent=1) + "\n")


if __name__ == "__main__":
    main()
