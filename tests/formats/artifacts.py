"""Random damage of bpd_jax's own headers, arrays and checkpoints."""

import functools
import json
import pathlib
import shutil
import tempfile
import zlib

import jax
import numpy as np
import optax

from bpd_jax.data.generations import open_generations, write_header, write_shard
from bpd_jax.data.row_shards import shard_name
from bpd_jax.data.rows import open_rows
from bpd_jax.errors import UserError
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.pretrained.file_parts import joined_file, split_file
from bpd_jax.training.checkpoint_files import DIGESTS, write_digests
from bpd_jax.training.checkpoints import Checkpoints, load_parameters
from bpd_jax.training.exported_params import load_run_parameters, write_exported
from bpd_jax.training.heads.base import Base
from bpd_jax.training.heads.states_cache import cached_states, open_states
from bpd_jax.training.state import TrainState, abstract_state, init_state
from tests import damage_test
from tests.data.rows_test import write_rows
from tests.formats.registry import add

# Without heads: trained heads have a softmax of their own, which a run does not have.
RUN = BlockwiseConfig(damage_test.TRUNK)

for kind, (header, save, read) in damage_test.READERS.items():
    if kind != "ngrams":
        add(f"json_{kind}", save, read, header)
for kind, pattern in (
    ("heads", "*.safetensors"),
    ("drafter", "*.safetensors"),
    ("refiner", "*.npz"),
):
    _, save, read = damage_test.READERS[kind]
    add(f"arrays_{kind}", save, read, pattern)


def _write_generations(folder: pathlib.Path) -> None:
    write_header(folder, base="abc", vocab_size=50, facts={"end": 1})
    random = np.random.default_rng(0)
    for index in range(2):
        texts = [random.integers(0, 50, 9) for _ in range(4)]
        write_shard(folder, index, texts, [3] * 4)


def _read_generations(folder: pathlib.Path) -> None:
    texts = open_generations(folder)
    for index in range(len(texts)):
        texts[index]


add("generations", _write_generations, _read_generations, "*.npz")
add(
    "rows",
    write_rows,
    lambda folder: open_rows(folder).batch(np.arange(10)),
    "*.npy",
)


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
    damage_test.save_config(RUN, folder / "run" / "model.json")
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


def _read_rows(folder: pathlib.Path) -> None:
    rows = open_rows(folder)
    rows.batch(np.arange(len(rows)))


for name, pattern in (("row_shards", "*/*.npy"), ("json_row_shards", "*/rows.json")):
    add(name, _write_row_shards, _read_rows, pattern)


@functools.cache
def _base() -> Base:
    params = jax.tree.map(
        lambda leaf: np.full(leaf.shape, 0.1, leaf.dtype), parameter_shapes(RUN)
    )
    return Base(RUN, params, batch_tokens=64, dtype="float16")


def _write_states(folder: pathlib.Path) -> None:
    damage_test.save_texts(folder)
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
