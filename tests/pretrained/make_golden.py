"""Writes golden/: tiny random models with their logits in transformers.

It needs an environment with torch and transformers, which the tests do not:

    pip install torch transformers
    python tests/pretrained/make_golden.py [NAME …]

Every folder is a model as `save_pretrained` writes it, with a tokenizer of one word
per token, and `expected.npz`: a text and the logits after each of its tokens, float32.
`rotary.json` has the frequencies of published configurations.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import tokenizers
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

GOLDEN = pathlib.Path(__file__).parent / "golden"
VOCABULARY = 40

LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
WIDE = {**LLAMA, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
SCALED = {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 40,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

# Four layers, of which the last one and, in Gemma 2, the second have no window.
GEMMA = {
    **{k: v for k, v in LLAMA.items() if k != "max_position_embeddings"},
    "num_hidden_layers": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "query_pre_attn_scalar": 24,
    "sliding_window": 7,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [4.0, 5.0, 6.0],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 40,
}

# Family, configuration, tokens of the text, type of the file.
MODELS = {
    "llama": ("Llama", {**LLAMA, "tie_word_embeddings": True}, 40, "float32"),
    "llama_untied": ("Llama", LLAMA, 40, "float32"),
    "llama_biases": (
        "Llama",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
        20,
        "bfloat16",
    ),
    "llama_linear": ("Llama", {**LLAMA, "rope_parameters": LINEAR}, 40, "bfloat16"),
    "llama_dynamic": (
        "Llama",
        {**LLAMA, "rope_parameters": DYNAMIC, "max_position_embeddings": 20},
        20,
        "bfloat16",
    ),
    "llama3": ("Llama", {**WIDE, "rope_parameters": LLAMA3}, 40, "bfloat16"),
    "llama_yarn": ("Llama", {**WIDE, "rope_parameters": YARN}, 40, "bfloat16"),
    "mistral": (
        "Mistral",
        {**LLAMA, "head_dim": 6, "sliding_window": 24},
        24,
        "float16",
    ),
    "mistral_window": ("Mistral", {**LLAMA, "sliding_window": 7}, 40, "bfloat16"),
    "qwen2_windows": (
        "Qwen2",
        {
            **LLAMA,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
        40,
        "bfloat16",
    ),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5},
        40,
        "bfloat16",
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        40,
        "bfloat16",
    ),
    "smollm3": (
        "SmolLM3",
        {
            **LLAMA,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "pad_token_id": 1,
        },
        40,
        "bfloat16",
    ),
    "phi3": (
        "Phi3",
        {
            **LLAMA,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_window": 9,
            "pad_token_id": 1,
        },
        40,
        "bfloat16",
    ),
    "phi3_longrope": (
        "Phi3",
        {
            **WIDE,
            "head_dim": 8,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 40,
            "max_position_embeddings": 160,
            "pad_token_id": 1,
        },
        40,
        "bfloat16",
    ),
    "granite": (
        "Granite",
        {
            **LLAMA,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        40,
        "bfloat16",
    ),
    "olmo2": ("Olmo2", {**LLAMA, "pad_token_id": 1}, 40, "bfloat16"),
    "qwen2": ("Qwen2", {**LLAMA, "tie_word_embeddings": True}, 40, "float32"),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 8}, 40, "bfloat16"),
    "qwen3_yarn": (
        "Qwen3",
        {
            **WIDE,
            "rope_parameters": {**YARN, **SCALED},
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        40,
        "bfloat16",
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **LLAMA,
            "head_dim": 8,
            "moe_intermediate_size": 8,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        40,
        "bfloat16",
    ),
    "gpt2": ("GPT2", GPT2, 40, "float32"),
    "gpt2_untied": (
        "GPT2",
        {
            **GPT2,
            "tie_word_embeddings": False,
            "n_inner": 24,
            "activation_function": "gelu",
        },
        20,
        "bfloat16",
    ),
}

# Rotary settings of published configurations; 64 features are rotated, in 32 pairs.
ROTARY = {
    "plain": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama_3_1": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn_with_scales": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "yarn_not_truncated": {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn_of_short_texts": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 6,
        "attention_factor": 1.5,
    },
}


def make_model(family: str, fields: dict, dtype: str) -> torch.nn.Module:
    """A model without parameters that are zero or one, so that each has an effect.

    Its values are exact in `dtype`.
    """
    config = getattr(transformers, f"{family}Config")(**fields)
    family = family.removesuffix("Text")
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        mean = 0.0 if parameter.ndim > 1 else float(parameter.detach().mean() > 0.5)
        with torch.no_grad():
            parameter.normal_(mean, 0.3)
            parameter.copy_(parameter.to(getattr(torch, dtype)).float())
    return model


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
    family, fields, length, dtype = MODELS[name]
    folder = GOLDEN / name
    torch.manual_seed(len(name))
    model = make_model(family, fields, dtype)
    tokens = torch.randint(0, VOCABULARY, (1, length))
    with torch.no_grad():
        logits = model(tokens).logits[0]
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
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
    if len(sys.argv) > 1:
        for name in sys.argv[1:]:
            shutil.rmtree(GOLDEN / name, ignore_errors=True)
            write_model(name)
        return
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name in MODELS:
        write_model(name)
    rotary = {name: rotary_frequencies(ROTARY[name]) for name in ROTARY}
    (GOLDEN / "rotary.json").write_text(json.dumps(rotary, indent=1) + "\n")


if __name__ == "__main__":
    main()
