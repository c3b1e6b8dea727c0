"""Random damage of models and drafters in formats of other programs."""

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.pretrained.drafter_import import import_drafter
from bpd_jax.pretrained.gguf_model import open_gguf
from bpd_jax.pretrained.huggingface import open_folder
from bpd_jax.pretrained.medusa_import import import_heads
from bpd_jax.pretrained.pretrained_checkpoint import load_trunk
from tests.formats.registry import add
from tests.pretrained import drafter_conversion_test, medusa_test
from tests.pretrained.conftest import TinyModel

TESTS = pathlib.Path(__file__).parent.parent
HF_FOLDER = TESTS / "pretrained" / "golden" / "llama3"
DRAFTERS = TESTS / "pretrained" / "golden_drafters"


def _read_trunk(checkpoint: Any) -> None:
    load_trunk(checkpoint.config, checkpoint.layout, checkpoint.tensors)
    ends = checkpoint.end_tokens
    Tokenizer(checkpoint.tokenizer, "folder", ends[0]).encode("Why?")


add(
    "gguf",
    lambda folder: TinyModel.make("llama").write(folder / "m.gguf"),
    lambda folder: _read_trunk(open_gguf(folder / "m.gguf")),
    "*",
)


def _copied(source: pathlib.Path) -> Callable[[pathlib.Path], object]:
    return lambda folder: shutil.copytree(source, folder, dirs_exist_ok=True)


for kind, pattern in (
    ("config", "config.json"),
    ("tokenizer", "tokenizer.json"),
    ("tokenizer_config", "tokenizer_config.json"),
    ("safetensors", "*.safetensors"),
):
    add(
        f"huggingface_{kind}",
        _copied(HF_FOLDER),
        lambda folder: _read_trunk(open_folder(folder)),
        pattern,
    )


def _read_drafter(name: str) -> Callable[[pathlib.Path], object]:
    params: list[Any] = []

    def read(folder: pathlib.Path) -> object:
        params[:] = params or [drafter_conversion_test.target_params(name)]
        return import_drafter(
            folder, drafter_conversion_test.MODEL, params[0], name="tiny"
        )

    return read


for name in ("deepspec", "dflash", "speculators_dspark"):
    for kind, pattern in (("config", "config.json"), ("tensors", "*.safetensors")):
        read = _read_drafter(name)
        add(f"{name}_{kind}", _copied(DRAFTERS / name), read, pattern)


def _write_medusa(folder: pathlib.Path) -> None:
    random = np.random.default_rng(0)
    base = jax.tree.map(
        lambda leaf: random.normal(0, 0.3, leaf.shape).astype(np.float32),
        parameter_shapes(BlockwiseConfig(medusa_test.TRUNK)),
    )
    model = medusa_test.with_heads(base, medusa_test.CONFIGS["own"])
    medusa_test.export(folder / "heads", model, "vllm")


add(
    "medusa",
    _write_medusa,
    lambda folder: import_heads(folder / "heads", medusa_test.TRUNK),
    "heads/*",
)


def _write_folder_in_parts(folder: pathlib.Path) -> None:
    """A model with two files of tensors and the smaller files of newer models."""
    _copied(HF_FOLDER)(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, folder / file)
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    for name, content in {
        "model.safetensors.index.json": {"metadata": {}, "weight_map": weight_map},
        "generation_config.json": {"eos_token_id": end, "do_sample": True},
        "special_tokens_map.json": {"bos_token": {"content": "<s>"}},
    }.items():
        (folder / name).write_text(json.dumps(content))


for kind, pattern in (
    ("index", "*.index.json"),
    ("generation_config", "generation_config.json"),
    ("special_tokens", "special_tokens_map.json"),
):
    add(
        f"huggingface_{kind}",
        _write_folder_in_parts,
        lambda folder: _read_trunk(open_folder(folder)),
        pattern,
    )
