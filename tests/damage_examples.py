"""Small examples of every format that bpd_jax writes, with their readers."""

import dataclasses
import functools
import json
import lzma
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from bpd_jax.data.generations import open_generations, write_header, write_shard
from bpd_jax.data.rows import open_rows
from bpd_jax.data.text_task import TextTask
from bpd_jax.decoding.asset_files import read_tuning
from bpd_jax.decoding.choice import tuned_choice
from bpd_jax.decoding.run_loading import load_task
from bpd_jax.drafting.assets import read_accuracies
from bpd_jax.formats.file_parts import joined_file, split_file
from bpd_jax.models.attachment_files import DRAFTER_FILES
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.config_files import load_config, save_config
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.ngrams.counting.counts import NGramCounts, count_ngrams
from bpd_jax.ngrams.evaluation import evaluate
from bpd_jax.ngrams.formats.arpa import write_arpa
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.storage import _content_checksum
from bpd_jax.studies import run_files
from bpd_jax.training.checkpoint_files import DIGESTS, write_digests
from bpd_jax.training.checkpoints import Checkpoints, load_parameters
from bpd_jax.training.state import TrainState, abstract_state, init_state
from tests.data.rows_test import write_rows
from tests.models.attachments_test import FILES, write_drafter


@dataclasses.dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
      make: writes a valid example into an empty folder.
      read: reads it from there, as the commands do.
      files: pattern of the files that are damaged.
      reseal: updates the checksums of a damaged folder, as an attacker would;
        None for formats without any.
    """

    make: Callable[[pathlib.Path], object]
    read: Callable[[pathlib.Path], object]
    files: str
    reseal: Callable[[pathlib.Path], object] | None = None


FORMATS: dict[str, Format] = {}

# The shapes of a drafter are traced, which takes longer than reading it.
load_drafter = dataclasses.replace(
    DRAFTER_FILES, shapes=functools.cache(DRAFTER_FILES.shapes)
).load


def add(name: str, *arguments: Any, **named: Any) -> None:
    """Adds a format; the arguments are those of `Format`."""
    FORMATS[name] = Format(*arguments, **named)


ROOT = pathlib.Path(__file__).parent.parent
TRUNK = TransformerConfig(40, 1, 16, 24, 4, max_length=32, rotary=RotaryConfig(10000.0))
HEADS = BlockHeadsConfig(3, kind="medusa", own_softmax=True)
# Without heads: trained heads have a softmax of their own, which a run does not have.
RUN = BlockwiseConfig(TRUNK)


def _save_model(folder: pathlib.Path) -> None:
    save_config(BlockwiseConfig(TRUNK, HEADS), folder / "model.json")


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
    ("heads", *FILES["heads"], "heads.json", "arrays_heads"),
    ("drafter", write_drafter, load_drafter, "drafter.json", "arrays_drafter"),
    ("refiner", *FILES["refiner"], "refiner.json", "arrays_refiner"),
    ("texts", _write_generations, _read_generations, "distill.json", "generations"),
    ("rows", write_rows, _read_rows, "rows.json", "rows"),
    ("task", _save_task, lambda f: load_task(f / "task.json"), "task.json", ""),
):
    add(f"json_{name}", write, read, header)
    if arrays:
        add(arrays, write, read, "*.[ns][pa]*")  # .npy, .npz or .safetensors
add(
    "json_choice",
    _save_tuning,
    lambda folder: tuned_choice(
        "drafting.json", read_tuning(folder / "drafting.json"), "cpu", 1
    ),
    "drafting.json",
)
add(
    "json_accuracies",
    _save_tuning,
    lambda folder: read_accuracies(read_tuning(folder / "drafting.json"), folder),
    "drafting.json",
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


def _write_parts(folder: pathlib.Path) -> None:
    (folder / "file").write_bytes(bytes(range(256)) * 9)
    split_file(folder / "file", folder / "parts", 700)


def _read_parts(folder: pathlib.Path) -> None:
    with joined_file(folder / "parts") as path:
        path.read_bytes()


add("parts", _write_parts, _read_parts, "parts/*")


def _counts() -> NGramCounts:
    random = np.random.default_rng(0)
    return count_ngrams(random.integers(0, 9, (20, 12)).tolist(), order=3, vocab_size=9)


def _use(model: NGramModel) -> None:
    """Queries a model that was read, so that kernels use its arrays."""
    evaluate([model], [[0, min(1, model.vocab_size - 1), 0]])
    model.context_sums()


def _write_arpa(folder: pathlib.Path) -> None:
    write_arpa(estimate_katz(_counts()), folder / "m.arpa")


def _save_over(folder: pathlib.Path, save: Callable[[pathlib.Path], object]) -> None:
    """For writers that create the folder themselves."""
    folder.rmdir()
    save(folder)


def _reseal_arrays(folder: pathlib.Path) -> None:
    """Updates the checksums of n-gram arrays, where the arrays can be read."""
    path = next(folder.glob("ngram_*.json"))
    try:
        header = json.loads(path.read_bytes())
        for name, array_header in header["arrays"].items():
            array = np.load(folder / f"{name}.npy", allow_pickle=False)
            array_header["crc32"] = zlib.crc32(np.ascontiguousarray(array).data)
        header["crc32"] = _content_checksum(header)
        path.write_text(json.dumps(header))
    except Exception:  # It is damaged so that no checksum can fit.
        return


add("arpa", _write_arpa, lambda f: _use(load_model(f / "m.arpa")), "*")
add(
    "ngram_model",
    lambda folder: _save_over(folder, estimate_katz(_counts()).save),
    lambda folder: _use(load_model(folder)),
    "*",
    reseal=_reseal_arrays,
)
add(
    "ngram_counts",
    lambda folder: _save_over(folder, _counts().save),
    lambda folder: _use(estimate_katz(NGramCounts.load(folder))),
    "*",
    reseal=_reseal_arrays,
)


def _write_study(folder: pathlib.Path) -> None:
    facts = {"labels": {"bpd": "BPD"}, "tasks": {"squad": "SQuAD"}}
    run_files.write_header(folder, "table4", facts)
    lines = {}
    for path in sorted(ROOT.glob("experiments/*/results/*/records.jsonl.xz")):
        with lzma.open(path) as stream:
            line = stream.readline()
            lines.setdefault(json.loads(line)["kind"], line)
    assert len(lines) > 3
    (folder / "records.jsonl").write_bytes(b"".join(lines.values()))


def _study(folder: pathlib.Path) -> None:
    run = run_files.open_run(folder)
    assert run.label("bpd")
    assert run.task_label("squad")
    for record in run.records:
        _ = getattr(record, "calls", None)


add("json_study", _write_study, _study, "study.json")
add("records.jsonl", _write_study, _study, "*.jsonl")
