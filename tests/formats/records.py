"""Random damage of settings, logs and records of studies."""

import gzip
import json
import math
import pathlib

import numpy as np

from bpd_jax.base import configuration
from bpd_jax.decoding import distillation
from bpd_jax.decoding.recording import RecordedText
from bpd_jax.studies import run_files, tuning
from bpd_jax.studies.text_files import load_texts, save_texts
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.metrics import FILE_NAME, MetricsWriter, read_rows
from tests.formats.registry import add, packed, unpacked, written
from tests.formats.texts import small_tokenizer

ROOT = pathlib.Path(__file__).parent.parent.parent


def _write_study(folder: pathlib.Path) -> None:
    facts = {"labels": {"bpd": "BPD"}, "tasks": {"squad": "SQuAD"}}
    run_files.write_header(folder, "table4", facts)
    lines = {}
    for path in sorted(ROOT.glob("experiments/*/results/*/records.jsonl.gz")):
        with gzip.open(path) as stream:
            line = stream.readline()
            lines.setdefault(json.loads(line)["kind"], line)
    assert len(lines) > 3
    (folder / "records.jsonl").write_bytes(b"".join(lines.values()))


def _write_published(folder: pathlib.Path) -> None:
    _write_study(folder / "run")
    run_files.publish(run_files.open_run(folder / "run"), folder / "published")


def _study(folder: pathlib.Path) -> None:
    run = run_files.open_run(folder)
    assert run.label("bpd")
    assert run.task_label("squad")
    for record in run.records:
        _ = getattr(record, "calls", None)


add("json_study", _write_study, _study, "study.json")
add("records.jsonl", _write_study, _study, "*.jsonl")
add(
    "records.jsonl.gz",
    lambda folder: [(folder / "run").mkdir(), _write_published(folder)],
    lambda folder: _study(folder / "published"),
    "published/*.gz",
)


def _write_metrics(folder: pathlib.Path) -> None:
    with MetricsWriter(folder, 0) as writer:
        for step in range(5):
            writer.write(step, {"loss": 2.5 - step, "tokens_per_second": 3.0})


add(
    "metrics.jsonl",
    _write_metrics,
    lambda folder: read_rows(folder / FILE_NAME),
    FILE_NAME,
)


def _write_gin(folder: pathlib.Path) -> None:
    root = ROOT / "gin_configs"
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


add("gin_file", _write_gin, _read_gin, "run.gin")
add("gin_flags", _write_flags, _read_flags, "flags.txt")


def _write_recorded(folder: pathlib.Path) -> None:
    random = np.random.default_rng(0)
    texts = [
        RecordedText(
            input_ids=random.integers(0, 9, 4, np.int32),
            output_ids=random.integers(0, 9, size, np.int32),
            candidates=random.integers(0, 9, (size, 2, 3), np.int32),
            log_probs=random.normal(size=(size, 2, 3)).astype(np.float32),
            entropies=random.random((size, 3), np.float32),
            hidden=random.random((size, 8), np.float32),
            drafter=(
                random.integers(0, 9, (size, 2, 3), np.int32),
                random.normal(size=(size, 2, 3)).astype(np.float32),
                random.random((size, 2), np.float32),
            ),
        )
        for size in (3, 1, 5)
    ]
    save_texts(folder / "texts.npz", "abc", texts)


def _read_recorded(folder: pathlib.Path) -> None:
    for text in load_texts(folder / "texts.npz", "abc") or []:
        block = text.predicted_by("block")
        columns = (text.candidates, text.hidden, block.candidates, block.log_probs)
        assert {len(column) for column in columns} == {len(text.output_ids)}
        assert block.entropies.shape[1] == block.candidates.shape[1] + 1


def _read_packed(folder: pathlib.Path) -> None:
    packed(folder / "texts.npz")
    _read_recorded(folder)


add("recorded_texts", _write_recorded, _read_recorded, "*")
add(
    "recorded_arrays",
    lambda folder: [_write_recorded(folder), unpacked(folder / "texts.npz")],
    _read_packed,
    "texts/*",
)


def _read_alpha(folder: pathlib.Path) -> None:
    alpha, _ = tuning._read(folder / "alpha.json")
    assert math.isfinite(alpha)


add(
    "study_alpha",
    written("alpha.json", json.dumps({"alpha": 0.5, "zero_wins": False})),
    _read_alpha,
    "*",
)


def _read_made_up(folder: pathlib.Path) -> None:
    prompts = distillation.read_generated_prompts(folder / "prompts.json", 9)
    small_tokenizer().encode_batch(prompts)


add(
    "made_up_prompts",
    written("prompts.json", json.dumps([f"Why is {i} odd? ä" for i in range(9)])),
    _read_made_up,
    "*",
)
