"""Writes golden_drafters/: tiny random drafters, run by their authors' code.

DFlash2 has no code that runs without a server; `dflash2_logits` computes it from the
published names and shapes. The program needs an environment with torch, which the tests
do not, and for the layouts that are not of speculators the code of their authors
(z-lab/dflash and deepseek-ai/DeepSpec on GitHub). `--only=NAME` writes one folder:

    pip install torch transformers speculators==0.9.0
    python tests/pretrained/make_golden_drafters.py --dflash=FOLDER --deepspec=FOLDER

Every folder is a drafter as `save_pretrained` writes it, and `expected.npz`: features
`[T, F]` and tokens `[T]` of a text, anchors `[A]`, the embedding and the softmax of the
target, logits `[A, L-1, V']` given the true tokens, and the logits of the confidence
head `[A, L-1]` if there is one. All numbers are random and float32. `versions.json`
has the versions of everything.
"""

import argparse
import functools
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
from importlib.metadata import version
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

GOLDEN = pathlib.Path(__file__).parent / "golden_drafters"
VOCABULARY, WIDTH, LENGTH, MASK = 24, 8, 12, 21
ANCHORS = (3, 6, 7)

LAYERS = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": False,
}
SLIDING = {
    "layer_types": ["sliding_attention"] * 3,
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

# Changes of the layers, and fields of the drafter.
SPECULATORS = {
    "speculators_dflash": ({}, {"block_size": 4, "draft_vocab_size": VOCABULARY}),
    "speculators_dflash_draft": (
        {"num_hidden_layers": 1, "layer_types": None, "attention_bias": True},
        {"block_size": 3, "draft_vocab_size": 9},
    ),
    "speculators_dspark": (
        {"rope_parameters": YARN},
        {"block_size": 3, "draft_vocab_size": 9, "markov_rank": 3},
    ),
    "speculators_dspark_window": (
        SLIDING,
        {
            "block_size": 4,
            "draft_vocab_size": VOCABULARY,
            "markov_rank": 2,
            "sample_from_anchor": False,
            "confidence_head_with_markov": False,
            "sliding_window_non_causal": True,
        },
    ),
    "speculators_dspark_bare": (
        {"num_key_value_heads": 4},
        {
            "block_size": 2,
            "draft_vocab_size": VOCABULARY,
            "markov_rank": 0,
            "enable_confidence_head": False,
        },
    ),
}


# Written with their own embedding and softmax, as by versions before 0.9; later
# versions omit what equals the target's. The mask token's embedding differs.
SELF_CONTAINED = ("speculators_dspark", "speculators_dspark_window")


def randomize(model: torch.nn.Module) -> None:
    """Makes every parameter random, so that none is zero or one."""
    for name, parameter in model.named_parameters():
        mean = 1.0 if parameter.ndim == 1 and "norm" in name else 0.0
        with torch.no_grad():
            parameter.normal_(mean, 0.4)


def make_text(layers: int) -> dict[str, torch.Tensor]:
    """A text without the mask token; the features of its tokens are random too."""
    return {
        "features": torch.randn(1, LENGTH, layers * WIDTH),
        "tokens": torch.randint(0, MASK, (1, LENGTH)),
    }


def write(folder: pathlib.Path, model: torch.nn.Module, **arrays: torch.Tensor) -> None:
    """Writes a drafter and its expected outputs."""
    model.save_pretrained(folder)
    for name in ("generation_config.json", "config.py"):
        (folder / name).unlink(missing_ok=True)
    write_expected(folder, **arrays)


def write_expected(folder: pathlib.Path, **arrays: torch.Tensor) -> None:
    """Writes the text and the expected outputs."""
    np.savez(
        folder / "expected.npz",
        anchors=np.array(ANCHORS, np.int32),
        **{
            name: array.detach()
            .numpy()
            .astype(np.int32 if name == "tokens" else np.float32)
            for name, array in arrays.items()
        },
    )


def speculators_drafter(name: str) -> None:
    """One folder in the layout of speculators, run by the library itself."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models import dflash, dspark
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    changes, fields = SPECULATORS[name]
    kind = name.split("_")[1]
    layers = {k: v for k, v in {**LAYERS, **changes}.items() if v is not None}
    inner = transformers.Qwen3Config(**layers)
    inner._attn_implementation = "eager"
    config_class, model_class = {
        "dflash": (dflash.DFlashSpeculatorConfig, dflash.DFlashDraftModel),
        "dspark": (dspark.DSparkSpeculatorConfig, dspark.DSparkDraftModel),
    }[kind]
    config = config_class(
        transformer_layer_config=inner,
        aux_hidden_state_layer_ids=[1, 3],
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=2)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **fields,
    )
    model = model_class(config).eval()
    randomize(model)
    embedding, softmax = torch.randn(2, VOCABULARY, WIDTH)
    model.embed_tokens.weight.data.copy_(embedding)
    if name in SELF_CONTAINED:
        model.embed_tokens.weight.data[MASK] = torch.randn(WIDTH)
    rows = torch.arange(VOCABULARY)
    if model.use_draft_vocab:
        rows = torch.randperm(VOCABULARY)[: model.draft_vocab_size].sort().values
        members = torch.zeros(VOCABULARY, dtype=torch.bool)
        members[rows] = True
        model.load_vocab_mappings(members, rows - torch.arange(len(rows)))
    model.lm_head.weight.data.copy_(softmax[rows])
    text = make_text(2)
    arrays = library_logits(model, **text)
    write(
        GOLDEN / name,
        model,
        features=text["features"][0],
        tokens=text["tokens"][0],
        embedding=embedding,
        softmax=softmax,
        **arrays,
    )
    if name in SELF_CONTAINED:
        tensors = {
            key: value.contiguous()
            for key, value in model.state_dict().items()
            if not key.startswith("verifier_")
        }
        save_file(tensors, GOLDEN / name / "model.safetensors", {"format": "pt"})


def library_logits(
    model: torch.nn.Module, features: torch.Tensor, tokens: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The outputs of speculators at the anchors: `logits`, and perhaps `confidence`.

    Its models return a loss only, so the logits are taken where that is computed.

    Args:
      model: a drafter of the library.
      features: `[1, T, F]`.
      tokens: `[1, T]`.
    """
    dspark = type(model).__name__.startswith("DSpark")
    module = f"speculators.models.{'dspark' if dspark else 'dflash'}.core"
    length, width = tokens.shape[1], model.config.transformer_layer_config.hidden_size
    anchor_mask = torch.zeros(1, length)
    anchor_mask[0, list(ANCHORS)] = 1
    captured = {}

    def capture(logits, targets, *others, **options):
        del targets, options
        captured["logits"] = logits
        if dspark:
            captured["confidence"] = others[0]
        return torch.zeros(()), {}

    with torch.no_grad(), mock.patch(f"{module}.compute_metrics", capture):
        model(
            hidden_states=features,
            input_ids=tokens,
            loss_mask=anchor_mask,
            verifier_last_hidden_states=torch.zeros(1, length, width),
            document_ids=torch.zeros(1, length, dtype=torch.long),
            max_anchors=len(ANCHORS),
        )
    queries, skipped = model.config.block_size, 1 - model.config.sample_from_anchor
    blocks = {
        name: value.reshape(len(ANCHORS), queries, -1)[:, skipped:]
        for name, value in captured.items()
        if value is not None
    }
    if "confidence" in blocks:
        blocks["confidence"] = blocks["confidence"][..., 0]
    return blocks


def dflash_drafter(folder: pathlib.Path) -> None:
    """z-lab's layout, run by z-lab's code."""
    path = folder / "dflash" / "model.py"
    spec = importlib.util.spec_from_file_location("dflash_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = transformers.Qwen3Config(
        **LAYERS,
        block_size=4,
        num_target_layers=4,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 2]},
    )
    config._attn_implementation = "eager"
    model = module.DFlashDraftModel(config).eval()
    randomize(model)
    embedding, softmax = torch.randn(2, VOCABULARY, WIDTH)
    text = make_text(2)
    logits = []
    for anchor in ANCHORS:
        block = torch.tensor([text["tokens"][0, anchor]] + [MASK] * 3)
        with torch.no_grad():
            states = model(
                target_hidden=text["features"][:, :anchor],
                noise_embedding=embedding[block][None],
                position_ids=torch.arange(anchor + 4)[None],
                is_causal=False,
            )
        logits.append(states[0, 1 - model.block_size :] @ softmax.T)
    write(
        GOLDEN / "dflash",
        model,
        features=text["features"][0],
        tokens=text["tokens"][0],
        embedding=embedding,
        softmax=softmax,
        logits=torch.stack(logits),
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


def dflash2_drafter() -> None:
    """The layout of DFlash2: a moving window, convolutions and a selector."""
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


def deepspec_drafter(folder: pathlib.Path) -> None:
    """DeepSpec's layout, run by DeepSpec's code."""
    sys.path.insert(0, str(folder))
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

    config = transformers.Qwen3Config(
        **LAYERS,
        block_size=3,
        num_target_layers=4,
        mask_token_id=MASK,
        target_layer_ids=[0, 2],
        num_anchors=4,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        markov_rank=3,
        markov_head_type="vanilla",
    )
    config._attn_implementation = "eager"
    model = Qwen3DSparkModel(config).eval()
    randomize(model)
    text = make_text(2)
    logits, confidence = [], []
    for anchor in ANCHORS:
        block = torch.tensor([[text["tokens"][0, anchor]] + [MASK] * 2])
        previous = text["tokens"][:, anchor : anchor + 3]
        with torch.no_grad():
            states = model._forward_backbone(
                position_ids=torch.arange(anchor + 3)[None],
                noise_embedding=model.embed_tokens(block),
                target_hidden_states=text["features"][:, :anchor],
                is_causal=False,
            )
            corrected = model.markov_head.apply_block_logits(
                model.compute_logits(states)[:, None],
                token_ids=previous[:, None],
                hidden_states=states[:, None],
            )
            confidence.append(model.predict_confidence_step(states, previous)[0])
        logits.append(corrected[0, 0])
    write(
        GOLDEN / "deepspec",
        model,
        features=text["features"][0],
        tokens=text["tokens"][0],
        embedding=model.embed_tokens.weight,
        softmax=model.lm_head.weight,
        logits=torch.stack(logits),
        confidence=torch.stack(confidence),
    )


def commit(folder: pathlib.Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.strip()


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


OURS = {"dflash2": dflash2_drafter} | {
    name: functools.partial(eagle_drafter, name) for name in EAGLES
}


def main() -> None:
    """Rewrites all folders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dflash", type=pathlib.Path)
    parser.add_argument("--deepspec", type=pathlib.Path)
    parser.add_argument("--only", choices=list(OURS))
    arguments = parser.parse_args()
    for number, (name, write_folder) in enumerate(OURS.items()):
        torch.manual_seed(200 + number)
        if arguments.only in (None, name):
            shutil.rmtree(GOLDEN / name, ignore_errors=True)
            write_folder()
    if arguments.only:
        return
    if arguments.dflash is None or arguments.deepspec is None:
        parser.error("give --dflash and --deepspec, or --only.")
    for number, name in enumerate(SPECULATORS):
        torch.manual_seed(number)
        speculators_drafter(name)
    torch.manual_seed(100)
    dflash_drafter(arguments.dflash)
    torch.manual_seed(101)
    deepspec_drafter(arguments.deepspec)
    versions = {
        **{name: version(name) for name in ("speculators", "torch", "transformers")},
        "z-lab/dflash": commit(arguments.dflash),
        "deepseek-ai/DeepSpec": commit(arguments.deepspec),
    }
    (GOLDEN / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
