"""Random damage of bpd_jax's own headers, arrays and checkpoints."""

import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile
import zlib
from typing import Any

import jax
import numpy as np
import optax

from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import open_generations, write_header, write_shard
from bpd_jax.data.row_shards import shard_name
from bpd_jax.data.rows import open_rows
from bpd_jax.data.text_task import TextTask
from bpd_jax.decoding.asset_files import load_accuracies
from bpd_jax.decoding.loading import load_task
from bpd_jax.decoding.speedup import tuned_choice
from bpd_jax.models.block_heads import init_heads
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import (
    BlockHeadsConfig,
    BlockwiseConfig,
    load_config,
    save_config,
)
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_files import load_drafter, save_drafter
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.heads_files import load_heads, save_heads
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.models.refiner_files import load_refiner, save_refiner
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.trained_refiners import MarkovConfig, init_refiner
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.pretrained.file_parts import joined_file, split_file
from bpd_jax.training.checkpoint_files import DIGESTS, write_digests
from bpd_jax.training.checkpoints import Checkpoints, load_parameters
from bpd_jax.training.exported_params import load_run_parameters, write_exported
from bpd_jax.training.heads.frozen_states import FrozenModel
from bpd_jax.training.heads.states_cache import cached_states, open_states
from bpd_jax.training.state import TrainState, abstract_state, init_state
from tests.data.rows_test import write_rows
from tests.formats.registry import add

TRUNK = TransformerConfig(40, 1, 16, 24, 4, max_length=32, rotary=RotaryConfig(10000.0))
HEADS = BlockHeadsConfig(3, kind="medusa", own_softmax=True)
# Without heads: trained heads have a softmax of their own, which a run does not have.
RUN = BlockwiseConfig(TRUNK)


def _save_model(folder: pathlib.Path) -> None:
    save_config(BlockwiseConfig(TRUNK, HEADS), folder / "model.json")


_FACTS: dict[str, Any] = {"base": "a", "base_name": "b", "d_model": 16}
_FACTS |= {"vocab_size": 40, "facts": {"accuracies": [[0.5]]}}


def _save_small_heads(folder: pathlib.Path) -> None:
    base = {"trunk": {"embedding": np.zeros((40, 16), np.float32)}}
    model = BlockwiseConfig(TRUNK, HEADS)
    heads = init_heads(model, base, HEADS, jax.random.key(0), None)
    save_heads(folder, HEADS, heads, **_FACTS)


def _save_small_drafter(folder: pathlib.Path) -> None:
    config = BlockDrafterConfig((0,), block_size=3).resolve(TRUNK)
    params = DrafterFunctions(config, TRUNK).init(jax.random.key(0))
    save_drafter(folder, config, params, **{**_FACTS, "facts": {"steps": 3}})


def _save_markov(folder: pathlib.Path) -> None:
    config = MarkovConfig(31, 8, 4, rank=5)
    save_refiner(folder, config, init_refiner(config, jax.random.key(0)), {"a": 1})


def _save_task(folder: pathlib.Path) -> None:
    fields = dataclasses.asdict(TextTask("text_files", "a/*.txt", "bpe:300"))
    (folder / "task.json").write_text(json.dumps(fields))


def _save_tuning(folder: pathlib.Path) -> None:
    facts = {"choices": {"1": "bpd"}, "device": "cpu", "accuracies": [[0.5]]}
    (folder / "drafting.json").write_text(json.dumps(facts))


def _write_generations(folder: pathlib.Path) -> None:
    write_header(folder, base="abc", vocab_size=40, facts={"end": 1})
    random = np.random.default_rng(0)
    for index in range(2):
        texts = [random.integers(0, 40, 9) for _ in range(4)]
        write_shard(folder, index, texts, [3] * 4)


def _read_generations(folder: pathlib.Path) -> None:
    texts = open_generations(folder)
    for index in range(len(texts)):
        texts[index]


def _read_rows(folder: pathlib.Path) -> None:
    rows = open_rows(folder)
    rows.batch(np.arange(len(rows)))


for name, write, read, header, arrays in (
    ("model", _save_model, lambda f: load_config(f / "model.json"), "model.json", ""),
    ("heads", _save_small_heads, load_heads, "heads.json", "arrays_heads"),
    ("drafter", _save_small_drafter, load_drafter, "drafter.json", "arrays_drafter"),
    ("refiner", _save_markov, load_refiner, "refiner.json", "arrays_refiner"),
    ("texts", _write_generations, _read_generations, "distill.json", "generations"),
    ("rows", write_rows, _read_rows, "rows.json", "rows"),
    ("task", _save_task, lambda f: load_task(f / "task.json"), "task.json", ""),
):
    add(f"json_{name}", write, read, header)
    if arrays:
        add(arrays, write, read, "*.[ns][pa]*")  # .npy, .npz or .safetensors
for name, read_tuning in (
    ("choice", lambda path: tuned_choice(path, "cpu", 1)),
    ("accuracies", load_accuracies),
):
    read = lambda folder, read=read_tuning: read(folder / "drafting.json")  # noqa: E731
    add(f"json_{name}", _save_tuning, read, "drafting.json")


def _optimizer() -> optax.GradientTransformation:
    return optax.sgd(0.1)


@functools.cache
def _abstract_state() -> TrainState:
    return abstract_state(RUN, _optimizer(), make_mesh(MeshConfig()))


def _write_checkpoint(folder: pathlib.Path, name: str = "run") -> None:
    with Checkpoints(folder / name, keep=1) as checkpoints:
        state = init_state(RUN, _optimizer(), _abstract_state(), 0)
        checkpoints.save(3, state, {"given": 1})


def _write_lone_checkpoint(folder: pathlib.Path) -> None:
    _write_checkpoint(folder)
    digests = (folder / "run" / "3" / DIGESTS).read_text()
    intact = {"digests": digests, "sums": _sums(folder)}
    (folder / "intact.json").write_text(json.dumps(intact))


def _sums(folder: pathlib.Path) -> list[int]:
    """Checksums of all arrays of a checkpoint, read as by decoding and by resuming."""
    arrays = [load_parameters(folder / "run", RUN)]
    with Checkpoints(folder / "run", keep=1) as checkpoints:
        checkpoints.is_stacked()
        arrays.append(checkpoints.restore(_abstract_state()))
        checkpoints.restore_data()
    return [zlib.crc32(np.asarray(array).data) for array in jax.tree.leaves(arrays)]


def _read_checkpoint(folder: pathlib.Path) -> None:
    sums = _sums(folder)
    intact = json.loads((folder / "intact.json").read_bytes())
    if (folder / "run" / "3" / DIGESTS).read_bytes() == intact["digests"].encode():
        assert sums == intact["sums"], "other weights were read, with old digests"


def _reseal_checkpoint(folder: pathlib.Path) -> None:
    checkpoint = folder / "run" / "3"
    (checkpoint / DIGESTS).unlink(missing_ok=True)
    write_digests(checkpoint)


add(
    "checkpoint",
    _write_lone_checkpoint,
    _read_checkpoint,
    "run/3/**/*",
    reseal=_reseal_checkpoint,
)


def _write_slim(folder: pathlib.Path) -> None:
    _write_checkpoint(folder / "run", "checkpoints")
    save_config(RUN, folder / "run" / "model.json")
    for name in ("task.json", "tokenizer.json"):
        (folder / "run" / name).write_text("{}")
    write_exported(folder / "run", folder / "slim")


add(
    "slim",
    _write_slim,
    lambda folder: load_run_parameters(folder / "slim", RUN),
    "slim/*",
)


def _write_parts(folder: pathlib.Path) -> None:
    (folder / "file").write_bytes(bytes(range(256)) * 9)
    split_file(folder / "file", folder / "parts", 700)


def _read_parts(folder: pathlib.Path) -> None:
    with joined_file(folder / "parts") as path:
        path.read_bytes()


add("parts", _write_parts, _read_parts, "parts/*")


def _write_row_shards(folder: pathlib.Path) -> None:
    for index in range(3):
        write_rows(folder / shard_name(index, 3))


for name, pattern in (("row_shards", "*/*.npy"), ("json_row_shards", "*/rows.json")):
    add(name, _write_row_shards, _read_rows, pattern)


@functools.cache
def _base() -> FrozenModel:
    params = jax.tree.map(
        lambda leaf: np.full(leaf.shape, 0.1, leaf.dtype), parameter_shapes(RUN)
    )
    return FrozenModel(RUN, params, batch_tokens=64, dtype="float16")


def _write_states(folder: pathlib.Path) -> None:
    _write_generations(folder)
    states = cached_states(
        folder / "states",
        open_generations(folder),
        _base(),
        "abc",
        include_prompts=True,
    )
    assert len(states.positions)


def _read_states(folder: pathlib.Path) -> None:
    """Reads states as refiner training does, and as head training, which adds some."""
    texts = open_generations(folder)
    with tempfile.TemporaryDirectory() as scratch:
        copy = shutil.copytree(folder / "states", pathlib.Path(scratch) / "states")
        refused = None
        try:
            states = [open_states(copy, "abc")]
        except UserError as error:
            states, refused = [], error
        states.append(cached_states(copy, texts, _base(), "abc", include_prompts=True))
        for states_of_texts in states:
            states_of_texts.read(np.arange(len(states_of_texts.positions)))
    if refused:
        raise refused


for name, pattern in (
    ("json_states", "states.json"),
    ("states_texts", "texts.npz"),
    ("states", "*.npy"),
):
    add(name, _write_states, _read_states, f"states/{pattern}")
