"""Damaged headers of our own formats are read, or refused in one sentence.

The tests of a format's module damage its arrays and lines.
"""

import copy
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import open_generations, write_header, write_shard
from bpd_jax.data.rows import open_rows
from bpd_jax.data.text_task import TextTask
from bpd_jax.decoding.asset_files import read_tuning
from bpd_jax.decoding.loading import load_task
from bpd_jax.decoding.speedup import tuned_choice
from bpd_jax.drafting.assets import read_accuracies
from bpd_jax.models.block_heads import init_heads
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
from bpd_jax.models.refiner_files import load_refiner, save_refiner
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.trained_refiners import MarkovConfig, init_refiner
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.storage import _content_checksum
from bpd_jax.studies import run_files
from tests.data.rows_test import write_rows

TRUNK = TransformerConfig(40, 1, 16, 24, 4, max_length=32, rotary=RotaryConfig(10000.0))
HEADS = BlockHeadsConfig(3, kind="medusa", own_softmax=True)
FACTS: dict[str, Any] = {"base": "a", "base_name": "b", "d_model": 16}
FACTS |= {"vocab_size": 40, "facts": {"accuracies": [[0.5]]}}


def write_model(folder):
    save_config(BlockwiseConfig(TRUNK, HEADS), folder / "model.json")


def write_heads(folder):
    base = {"trunk": {"embedding": np.zeros((40, 16), np.float32)}}
    model = BlockwiseConfig(TRUNK, HEADS)
    heads = init_heads(model, base, HEADS, jax.random.key(0), None)
    save_heads(folder, HEADS, heads, **FACTS)


def write_drafter(folder):
    config = BlockDrafterConfig((0,), block_size=3).resolve(TRUNK)
    params = DrafterFunctions(config, TRUNK).init(jax.random.key(0))
    save_drafter(folder, config, params, **{**FACTS, "facts": {"steps": 3}})


def write_refiner(folder):
    config = MarkovConfig(31, 8, 4, rank=5)
    save_refiner(folder, config, init_refiner(config, jax.random.key(0)), {"a": 1})


def write_task(folder):
    fields = dataclasses.asdict(TextTask("text_files", "a/*.txt", "bpe:300"))
    (folder / "task.json").write_text(json.dumps(fields))


def write_tuning(folder):
    facts = {"choices": {"1": "bpd"}, "device": "cpu", "accuracies": [[0.5]]}
    (folder / "drafting.json").write_text(json.dumps(facts))


def write_generations(folder):
    write_header(folder, base="abc", vocab_size=40, facts={"end": 1})
    random = np.random.default_rng(0)
    for index in range(2):
        write_shard(folder, index, [random.integers(0, 40, 9) for _ in "1234"], [3] * 4)


def read_generations(folder):
    texts = open_generations(folder)
    for index in range(len(texts)):
        texts[index]


def read_rows(folder):
    rows = open_rows(folder)
    rows.batch(np.arange(len(rows)))


def write_ngrams(folder):
    tokens = np.random.default_rng(0).integers(0, 9, (20, 12)).tolist()
    folder.rmdir()
    estimate_katz(count_ngrams(tokens, order=3, vocab_size=9)).save(folder)


def read_ngrams(folder):
    """Queries the model, so that kernels use its arrays."""
    model = load_model(folder)
    model.evaluate([[0, min(1, model.vocab_size - 1), 0]])
    model.context_sums()


def reseal_ngrams(path):
    """Updates the checksum of the header, as an attacker would."""
    try:
        header = json.loads(path.read_bytes())
        header["crc32"] = _content_checksum(header)
        path.write_text(json.dumps(header))
    except Exception:  # It is damaged so that no checksum can fit.
        return


def write_study(folder):
    facts = {"labels": {"bpd": "BPD"}, "tasks": {"squad": "SQuAD"}}
    run_files.write_header(folder, "table4", facts)
    (folder / "records.jsonl").touch()


def read_study(folder):
    run = run_files.open_run(folder)
    assert run.label("bpd")
    assert run.task_label("squad")


def read_choice(tuning, _):
    tuned_choice("drafting.json", tuning, "cpu", 1)


def of_tuning(read):
    return lambda folder: read(read_tuning(folder / "drafting.json"), folder)


Write = Callable[[pathlib.Path], object]
# By name of the header: what writes a valid example into an empty folder, and what
# reads it from there, as the commands do.
FORMATS: list[tuple[str, Write, Write]] = [
    ("model.json", write_model, lambda folder: load_config(folder / "model.json")),
    ("heads.json", write_heads, load_heads),
    ("drafter.json", write_drafter, load_drafter),
    ("refiner.json", write_refiner, load_refiner),
    ("distill.json", write_generations, read_generations),
    ("rows.json", write_rows, read_rows),
    ("task.json", write_task, lambda folder: load_task(folder / "task.json")),
    ("drafting.json", write_tuning, of_tuning(read_choice)),
    ("drafting.json", write_tuning, of_tuning(read_accuracies)),
    ("ngram_model.json", write_ngrams, read_ngrams),
    ("study.json", write_study, read_study),
]
INVALID_JSON = [
    b"", b"\xff", b"{", b"[]", b"null", b"1", b'"x"', b"NaN", b"-Infinity",
    b"1e999", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5_000,
]  # fmt: skip
VALUES = [
    *(None, [], {}, [1], {"a": 1}, "x", -1, 0, 2**70, 10**400, 1e300, True, "\ud800")
]


def mutated(value: Any) -> Iterator[Any]:
    """The value with each part of it missing or replaced by each of `VALUES`."""
    yield from VALUES
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            for part in mutated(value[key]):
                changed = copy.copy(value)
                changed[key] = part
                yield changed
            changed = copy.copy(value)
            del changed[key]
            yield changed


@pytest.fixture(params=FORMATS, ids=lambda each: each[0])
def artifact(request, tmp_path):
    """The folder of an artifact, the path of its header, and its reader."""
    name, write, read = request.param
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder)
    read(folder)
    return folder, folder / name, read


def test_damaged_json_is_reported(artifact):
    folder, header, read = artifact
    for data in INVALID_JSON:
        header.write_bytes(data)
        with pytest.raises(UserError):
            read(folder)
    header.unlink()
    header.mkdir()
    with pytest.raises(UserError):
        read(folder)


def test_changed_values_are_accepted_or_reported(artifact):
    folder, header, read = artifact
    reported = 0
    for value in mutated(json.loads(header.read_text())):
        header.write_text(json.dumps(value))
        if header.name == "ngram_model.json":
            reseal_ngrams(header)
        try:
            read(folder)
        except UserError:
            reported += 1
    assert reported > len(VALUES) // 2
