"""Writes tests/formats/golden_drafters/: tiny random block drafters.

They are run by their authors' code.

It needs an environment with torch, which the tests do not, and for the layouts that
are not of speculators the code of their authors (z-lab/dflash and deepseek-ai/DeepSpec
on GitHub). `dflash2.py` and `eagle.py` write other folders.

    pip install torch transformers speculators==0.9.0
    python scripts/golden/drafters.py --dflash=FOLDER --deepspec=FOLDER

Every folder is a drafter as `save_pretrained` writes it, and `expected.npz`: features
`[T, F]` and tokens `[T]` of a text, anchors `[A]`, the embedding and the softmax of the
target, logits `[A, L-1, V']` given the true tokens, and the logits of the confidence
head `[A, L-1]` if there is one. All numbers are random and float32. `versions.json`
has the versions of everything.
"""

import argparse
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

TESTS = pathlib.Path(__file__).parents[2] / "tests"
GOLDEN = TESTS / "formats" / "golden_drafters"
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
# Those in the layout of speculators, in the order of their seeds.
SPECULATORS = (
    "speculators_dflash",
    "speculators_dflash_draft",
    "speculators_dspark",
    "speculators_dspark_window",
    "speculators_dspark_bare",
)
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
    """One folder in the layout of speculators, run by the library itself.

    Its config.json, which is there before, describes it.
    """
    from speculators.models import dflash, dspark

    config_class, model_class = {
        "dflash": (dflash.DFlashSpeculatorConfig, dflash.DFlashDraftModel),
        "dspark": (dspark.DSparkSpeculatorConfig, dspark.DSparkDraftModel),
    }[name.split("_")[1]]
    config = config_class.from_pretrained(GOLDEN / name)
    config.transformer_layer_config._attn_implementation = "eager"
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


def main() -> None:
    """Rewrites the folders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dflash", type=pathlib.Path, required=True)
    parser.add_argument("--deepspec", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    for name in ("dflash", "deepspec"):
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
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
