"""The command `bpd_jax.prepare`."""

import json

import pytest

from bpd_jax.data.rows import open_rows
from tests.commands import assert_all_refused, succeed_all

pytest.importorskip("seqio")


@pytest.fixture
def folder(tmp_path):
    for split, count in {"train": 12, "validation": 5}.items():
        lines = [
            json.dumps(
                {"dialogue": f"A: {number}?\r\nB: no", "summary": f"no {number}"}
            )
            for number in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_rows_shards_and_gin_files(folder):
    task = ["--task=samsum", "--files={split}.jsonl"]
    rows = ["--length=64", "--output=rows"]
    gin_task = [
        "--gin_file=gin_configs/tasks/samsum.gin",
        "--gin.ExampleTask.files='{split}.jsonl'",
    ]
    shard = ["--length=64", "--output=parts", "--num_shards=2"]
    results = succeed_all(
        "bpd_jax.prepare",
        [*task, *rows],
        [*gin_task, *rows],
        [*gin_task, *shard, "--shard=1"],
        [*task, *shard, "--shard=0"],
        [*task, "--split=validation", "--length=16", "--output=short"],
        folder=folder,
    )
    assert " rows of 64 tokens: " in results[0][1]
    assert "of 12 texts" in results[0][1]
    assert "the inputs of 0 and the targets of 0 examples" in results[1][1]
    assert "shard-00001-of-00002: " in results[2][1]
    assert "the inputs of 5 and the targets of 0 examples" in results[4][1]
    assert open_rows(folder / "parts").num_documents == 12
    assert open_rows(folder / "rows").num_documents == 12
    assert open_rows(folder / "rows").fingerprint == (
        open_rows(folder / "parts").fingerprint
    )


def test_invalid_input_is_refused_in_one_sentence(folder):
    before = sorted(folder.rglob("*"))
    rows = "--output=o --length=9"
    cases = {
        "": "--task is missing",
        "--task=quad": "unknown task 'quad': choose one of c4, ",
        "--task=samsum": "--output or --cache_dir is missing",
        f"--task=samsum {rows} --num_shards=2": "--shard is missing",
        f"--task=stdlib {rows} --max_examples=3": (
            "--max_examples cannot be combined with --task=stdlib"
        ),
        "--task=samsum --gin_file=gin_configs/tasks/samsum.gin": (
            "--task cannot be combined with --gin_file"
        ),
    }
    commands = [(command.split(), message) for command, message in cases.items()]
    assert_all_refused("bpd_jax.prepare", commands, folder)
    assert sorted(folder.rglob("*")) == before
