"""Readers of our own JSON files accept any content or raise a `UserError`."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from bpd_jax.data.generations import open_generations, write_header, write_shard
from bpd_jax.data.rows import open_rows
from bpd_jax.data.text_task import TextTask
from bpd_jax.decoding.asset_files import load_accuracies
from bpd_jax.decoding.loading import load_task
from bpd_jax.decoding.speedup import tuned_choice
from bpd_jax.errors import UserError
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
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.storage import _content_checksum
from bpd_jax.studies import run_files
from tests.data.rows_test import write_rows

TRUNK = TransformerConfig(40, 1, 16, 24, 4, max_length=32, rotary=RotaryConfig(10000.0))
HEADS = BlockHeadsConfig(3, kind="medusa", own_softmax=True)


def save_model(folder):
    save_config(BlockwiseConfig(TRUNK, HEADS), folder / "model.json")


def save_small_heads(folder):
    model = BlockwiseConfig(TRUNK, HEADS)
    heads = init_heads(
        model,
        {"trunk": {"embedding": np.zeros((40, 16), np.float32)}},
        HEADS,
        jax.random.key(0),
        None,
    )
    save_heads(
        folder,
        HEADS,
        heads,
        base="a",
        base_name="b",
        d_model=16,
        vocab_size=40,
        facts={"accuracies": [[0.5]]},
    )


def save_small_drafter(folder):
    config = BlockDrafterConfig((0,), block_size=3).resolve(TRUNK)
    params = DrafterFunctions(config, TRUNK).init(jax.random.key(0))
    model_facts = {"base": "a", "base_name": "b", "d_model": 16, "vocab_size": 40}
    save_drafter(folder, config, params, facts={"steps": 3}, **model_facts)


def save_markov(folder):
    config = MarkovConfig(31, 8, 4, rank=5)
    save_refiner(folder, config, init_refiner(config, jax.random.key(0)), {"a": 1})


def save_texts(folder):
    write_header(folder, base="abc", vocab_size=9, facts={"end": 1})
    write_shard(folder, 0, [np.array([1, 2, 3])], [1])


def save_study(folder):
    facts = {"labels": {"bpd": "BPD"}, "tasks": {"squad": "SQuAD"}}
    run_files.write_header(folder, "table4", facts)


def save_task(folder):
    fields = dataclasses.asdict(TextTask("text_files", "a/*.txt", "bpe:300"))
    (folder / "task.json").write_text(json.dumps(fields))


def save_tuning(folder):
    facts = {"choices": {"1": "bpd"}, "device": "cpu", "accuracies": [[0.5]]}
    (folder / "drafting.json").write_text(json.dumps(facts))


def save_model_of_ngrams(folder):
    estimate_katz(count_ngrams([[0, 1], [0]], order=2, vocab_size=3)).save(folder)


def open_study(folder):
    run = run_files.open_run(folder)
    return run.label("bpd"), run.task_label("squad")


READERS: dict[str, tuple[str, Callable, Callable]] = {
    "model": ("model.json", save_model, lambda f: load_config(f / "model.json")),
    "heads": ("heads.json", save_small_heads, load_heads),
    "drafter": ("drafter.json", save_small_drafter, load_drafter),
    "refiner": ("refiner.json", save_markov, load_refiner),
    "texts": ("distill.json", save_texts, open_generations),
    "rows": ("rows.json", write_rows, open_rows),
    "study": ("study.json", save_study, open_study),
    "task": ("task.json", save_task, lambda f: load_task(f / "task.json")),
    "choice": (
        "drafting.json",
        save_tuning,
        lambda f: tuned_choice(f / "drafting.json", "cpu", 1),
    ),
    "accuracies": (
        "drafting.json",
        save_tuning,
        lambda f: load_accuracies(f / "drafting.json"),
    ),
    "ngrams": ("ngram_model.json", save_model_of_ngrams, NGramModel.load),
}
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


@pytest.fixture(params=READERS)
def artifact(request, tmp_path):
    """The folder of an artifact, the path of its header, and its reader."""
    name, save, read = READERS[request.param]
    folder = tmp_path / "folder"
    if request.param != "ngrams":
        folder.mkdir()
    save(folder)
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
        if header.name == "ngram_model.json" and isinstance(value, dict):
            # Update the checksum, as an attacker would.
            try:
                value["crc32"] = _content_checksum(value)
            except (TypeError, AttributeError):
                continue
        header.write_text(json.dumps(value))
        try:
            read(folder)
        except UserError:
            reported += 1
    assert reported > len(VALUES) // 2
