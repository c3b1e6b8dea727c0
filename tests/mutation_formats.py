"""The formats that `tests/mutations.py` damages: how each is written and read."""

import functools
import gzip
import json
import pathlib
import shutil
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from bpd_jax import configuration
from bpd_jax.data.generations import open_generations, write_header, write_shard
from bpd_jax.data.prompts import read_prompts_file
from bpd_jax.data.rows import open_rows
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.ngrams.counting import bounded_memory
from bpd_jax.ngrams.counting.counts import NGramCounts, count_ngrams
from bpd_jax.ngrams.counting.sources import open_source
from bpd_jax.ngrams.counting.windows import Packing
from bpd_jax.ngrams.formats.arpa import write_arpa
from bpd_jax.ngrams.formats.fst_files import write_fst
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.formats.symbols import read_symbols, write_symbols
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.storage import _content_checksum
from bpd_jax.pretrained.drafter_import import import_drafter
from bpd_jax.pretrained.file_parts import joined_file, split_file
from bpd_jax.pretrained.gguf_model import open_gguf
from bpd_jax.pretrained.huggingface import open_folder
from bpd_jax.pretrained.load_parameters import load_trunk
from bpd_jax.pretrained.medusa_import import import_heads
from bpd_jax.reporting.evaluation_records import training_curves
from bpd_jax.studies import run_files
from bpd_jax.training.checkpoint_files import DIGESTS, write_digests
from bpd_jax.training.checkpoints import Checkpoints, load_parameters
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.exported_params import load_run_parameters, write_exported
from bpd_jax.training.metrics import FILE_NAME, MetricsWriter, read_rows
from bpd_jax.training.state import TrainState, abstract_state, init_state
from tests import damage_test
from tests.data.rows_test import write_rows
from tests.mutations import Format
from tests.pretrained import drafter_conversion_test, medusa_test
from tests.pretrained.conftest import TinyModel

TESTS = pathlib.Path(__file__).parent
HF_FOLDER = TESTS / "pretrained" / "golden" / "llama3"
DRAFTERS = TESTS / "pretrained" / "golden_drafters"
SMALL = BlockwiseConfig(damage_test.TRUNK, damage_test.HEADS)
# Trained heads have a softmax of their own, which a run of a whole model has not.
RUN = BlockwiseConfig(damage_test.TRUNK)
FORMATS: dict[str, Format] = {}


def _counts() -> NGramCounts:
    random = np.random.default_rng(0)
    return count_ngrams(random.integers(0, 9, (20, 12)).tolist(), order=3, vocab_size=9)


def _use(model: NGramModel) -> None:
    """Asks a model that was read, so that kernels see its arrays."""
    model.evaluate([[0, min(1, model.vocab_size - 1), 0]])
    model.context_sums()


def _read_ngrams(name: str = "") -> Callable[[pathlib.Path], None]:
    return lambda folder: _use(load_model(folder / name))


def _katz(write: Callable[[NGramModel, pathlib.Path], object], name: str) -> Any:
    return lambda folder: write(estimate_katz(_counts()), folder / name)


def _save_over(folder: pathlib.Path, save: Callable[[pathlib.Path], object]) -> None:
    """For writers that replace a whole folder, and refuse one that is not theirs."""
    folder.rmdir()
    save(folder)


def _reseal_arrays(folder: pathlib.Path) -> None:
    """Makes the checksums of n-gram arrays fit, where the arrays can be read."""
    path = next(folder.glob("ngram_*.json"))
    try:
        header = json.loads(path.read_bytes())
        for name, about in header["arrays"].items():
            array = np.load(folder / f"{name}.npy", allow_pickle=False)
            about["crc32"] = zlib.crc32(np.ascontiguousarray(array).data)
        header["crc32"] = _content_checksum(header)
        path.write_text(json.dumps(header))
    except Exception:  # It is damaged so that no checksum can fit.
        return


def _add(name: str, *arguments: Any, **named: Any) -> None:
    assert name not in FORMATS, name
    FORMATS[name] = Format(*arguments, **named)


_add("arpa", _katz(write_arpa, "m.arpa"), _read_ngrams("m.arpa"), "*.arpa")
_add("arpa.gz", _katz(write_arpa, "m.arpa.gz"), _read_ngrams("m.arpa.gz"), "*.gz")
_add("fst", _katz(write_fst, "m.fst"), _read_ngrams("m.fst"), "*.fst")
_add(
    "symbols",
    lambda folder: write_symbols([f"w{i}" for i in range(30)], folder / "s.txt"),
    lambda folder: read_symbols(folder / "s.txt"),
    "*.txt",
)
_add(
    "ngram_model",
    lambda folder: _save_over(folder, estimate_katz(_counts()).save),
    _read_ngrams(),
    "*",
    reseal=_reseal_arrays,
)
_add(
    "ngram_counts",
    lambda folder: _save_over(folder, _counts().save),
    lambda folder: _use(estimate_katz(NGramCounts.load(folder))),
    "*",
    reseal=_reseal_arrays,
)

for kind, (header, save, read) in damage_test.READERS.items():
    if kind != "ngrams":
        _add(f"json_{kind}", save, read, header)
for kind, pattern in (
    ("heads", "*.safetensors"),
    ("drafter", "*.safetensors"),
    ("refiner", "*.npz"),
):
    _, save, read = damage_test.READERS[kind]
    _add(f"arrays_{kind}", save, read, pattern)


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


_add("generations", _write_generations, _read_generations, "*.npz")
_add(
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


_add(
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


def _prompts(name: str) -> Callable[[pathlib.Path], object]:
    lines = [json.dumps({"prompt": f"Why is {i} odd? ä"}) for i in range(20)]

    def write(folder: pathlib.Path) -> None:
        data = ("\n".join(lines) + "\n").encode()
        (folder / name).write_bytes(gzip.compress(data) if "gz" in name else data)

    return write


for name in ("prompts.txt", "prompts.jsonl", "prompts.jsonl.gz"):
    _add(
        name,
        _prompts(name),
        lambda folder, name=name: read_prompts_file(folder / name),
        "*",
    )


def _token_ids(name: str) -> Callable[[pathlib.Path], object]:
    def write(folder: pathlib.Path) -> None:
        tokens = np.random.default_rng(0).integers(0, 50, 200)
        data = " ".join(map(str, tokens)).replace(" 7 ", "\n").encode()
        if name.endswith(".npy"):
            np.save(folder / name, tokens.astype(np.uint16))
        else:
            (folder / name).write_bytes(gzip.compress(data) if "gz" in name else data)

    return write


def _read_token_ids(folder: pathlib.Path) -> None:
    (name,) = (path.name for path in folder.iterdir())
    source = open_source(tokens=str(folder / name), vocab_size=50)
    for stream, _, _ in bounded_memory.chunks(source, Packing(2, 50), 1 << 20):
        assert stream.min() >= 0


for name in ("token_ids.txt", "token_ids.txt.gz", "token_ids.npy"):
    _add(name, _token_ids(name), _read_token_ids, "*")


def _read_trunk(checkpoint: Any) -> None:
    load_trunk(checkpoint.config, checkpoint.layout, checkpoint.tensors)
    ends = checkpoint.end_tokens
    Tokenizer(checkpoint.tokenizer, "folder", ends[0]).encode("Why?")


_add(
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
    _add(
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
        _add(f"{name}_{kind}", _copied(DRAFTERS / name), read, pattern)


def _write_medusa(folder: pathlib.Path) -> None:
    random = np.random.default_rng(0)
    base = jax.tree.map(
        lambda leaf: random.normal(0, 0.3, leaf.shape).astype(np.float32),
        parameter_shapes(BlockwiseConfig(medusa_test.TRUNK)),
    )
    model = medusa_test.with_heads(base, medusa_test.CONFIGS["own"])
    medusa_test.export(folder / "heads", model, "vllm")


_add(
    "medusa",
    _write_medusa,
    lambda folder: import_heads(folder / "heads", medusa_test.TRUNK),
    "heads/*",
)


def _write_study(folder: pathlib.Path) -> None:
    facts = {"labels": {"bpd": "BPD"}, "tasks": {"squad": "SQuAD"}}
    run_files.write_header(folder, "table4", facts)
    lines = {}
    for path in sorted(TESTS.parent.glob("experiments/*/results/*/records.jsonl.gz")):
        with gzip.open(path) as stream:
            line = stream.readline()
            lines.setdefault(json.loads(line)["kind"], line)
    assert len(lines) > 3
    (folder / "records.jsonl").write_bytes(b"".join(lines.values()))


def _write_published(folder: pathlib.Path) -> None:
    _write_study(folder / "run")
    run_files.publish(run_files.open_run(folder / "run"), folder / "published")


def _study(folder: pathlib.Path) -> None:
    for record in run_files.open_run(folder).records:
        _ = getattr(record, "calls", None)


_add("records.jsonl", _write_study, _study, "*.jsonl")
_add(
    "records.jsonl.gz",
    lambda folder: [(folder / "run").mkdir(), _write_published(folder)],
    lambda folder: _study(folder / "published"),
    "published/*.gz",
)


def _write_metrics(folder: pathlib.Path) -> None:
    with MetricsWriter(folder, 0) as writer:
        for step in range(5):
            writer.write(step, {"loss": 2.5 - step, "tokens_per_second": 3.0})


_add(
    "metrics.jsonl",
    _write_metrics,
    lambda folder: [read_rows(folder / FILE_NAME), training_curves(folder / FILE_NAME)],
    FILE_NAME,
)
_add(
    "slim",
    _write_slim,
    lambda folder: load_run_parameters(folder / "slim", RUN),
    "slim/*",
)
_add(
    "run_tokenizer",
    lambda folder: shutil.copy(HF_FOLDER / "tokenizer.json", folder),
    Tokenizer.load,
    "*",
)


def _write_parts(folder: pathlib.Path) -> None:
    (folder / "file").write_bytes(bytes(range(256)) * 9)
    split_file(folder / "file", folder / "parts", 700)


def _read_parts(folder: pathlib.Path) -> None:
    with joined_file(folder / "parts") as path:
        path.read_bytes()


_add("parts", _write_parts, _read_parts, "parts/*")


def _write_gin(folder: pathlib.Path) -> None:
    root = TESTS.parent / "gin_configs"
    names = ("models/tiny.gin", "tasks/stdlib_small.gin", "runs/train.gin")
    parts = [(root / name).read_text(encoding="utf-8") for name in names]
    values = "STEPS = 1200\nBATCH_SIZE = 8\nLENGTH = 128\nLEARNING_RATE = 3e-3\n"
    lines = "\n".join(parts).replace("include ", "# ").splitlines()
    kept = [line for line in lines if not line.startswith("#")]
    text = "\n".join([*kept, values]) + "TransformerConfig.vocab_size = 512\n"
    drop = "TransformerConfig.vocab_size = @vocabulary_size()\n"
    (folder / "run.gin").write_text(text.replace(drop, ""))


def _read_gin(folder: pathlib.Path) -> object:
    return configuration.parse([folder / "run.gin"], [], TrainConfig).value


def _read_flags(folder: pathlib.Path) -> object:
    """The last lines as values of `--gin.NAME=VALUE`."""
    text = (folder / "flags.txt").read_text(encoding="utf-8", errors="replace")
    bindings = [line for line in text.split("\n") if line.strip()]
    return configuration.parse([folder / "run.gin"], bindings, TrainConfig).value


def _write_flags(folder: pathlib.Path) -> None:
    _write_gin(folder)
    flags = "STEPS = 7\nTrainConfig.head_weights = (1.0, 0.5)\nHEADS = 2\n"
    (folder / "flags.txt").write_text(flags + "TextTask.corpus = 'stdlib'\n")


_add("gin_file", _write_gin, _read_gin, "run.gin")
_add("gin_flags", _write_flags, _read_flags, "flags.txt")
