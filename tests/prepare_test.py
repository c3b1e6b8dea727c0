"""prepare, as a user calls it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from bpd_jax.data.rows import open_rows

pytest.importorskip("seqio")

ROOT = pathlib.Path(__file__).parent.parent

# Runs the command several times in one process: importing takes longer than the work.
SEVERAL = """
import contextlib, io, json, sys
from absl import flags
from bpd_jax import cli, prepare
done = []
for arguments in json.loads(sys.argv[1]):
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    sys.argv = ["prepare", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.run(prepare.main)
        except SystemExit as end:
            status = end.code or 0
    done.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(done))
"""


def prepare(folder, *commands):
    """Status, output and errors of each list of arguments."""
    process = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(commands)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


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


def test_rows_shards_gin_files_and_caches(folder):
    task = ["--task=samsum", "--files={split}.jsonl"]
    rows = ["--length=64", "--output=rows"]
    gin_task = [
        "--gin_file=gin_configs/tasks/samsum.gin",
        "--gin.ExampleTask.files='{split}.jsonl'",
    ]
    shard = ["--length=64", "--output=parts", "--num_shards=2"]
    done = prepare(
        folder,
        [*task, *rows],
        [*gin_task, *rows],
        [*gin_task, *shard, "--shard=1"],
        [*task, *shard, "--shard=0"],
        [*task, "--split=validation", "--length=16", "--output=short"],
    )
    for status, _, err in done:
        assert status == 0, err
    assert " rows of 64 tokens: " in done[0][1]
    assert "of 12 texts" in done[0][1]
    assert "the inputs of 0 and the targets of 0 examples, 0 tokens" in done[1][1]
    assert "shard-00001-of-00002: " in done[2][1]
    assert "the inputs of 5 and the targets of 0 examples" in done[4][1]
    assert open_rows(folder / "parts").num_documents == 12
    assert open_rows(folder / "rows").num_documents == 12
    assert open_rows(folder / "rows").fingerprint == (
        open_rows(folder / "parts").fingerprint
    )


@pytest.mark.parametrize(
    "given",
    [
        {
            "": "--task is missing",
            "--task=quad": "unknown task 'quad': the known ones are c4, ",
            "--task=samsum": "--output or --cache_dir is missing",
            "--task=samsum --output=o": "--length is missing",
            "--task=samsum --output=o --length=1": "length is 1",
            "--task=samsum --output=o --length=9 --num_shards=2": "--shard is missing",
            "--task=samsum --output=o --length=9 --num_shards=2 --shard=2": (
                "there is no shard 2 of 2"
            ),
            "--task=samsum --output=o --length=9 --split=tset": "no split 'tset'",
            "--task=samsum --output=o --length=9 --files=no.jsonl": (
                "files='no.jsonl' matches no file"
            ),
            "--task=xsum --output=o --length=9 --files=train.jsonl": (
                "train.jsonl, line 1 has no text in the field 'document'"
            ),
            "--task=stdlib --output=o --length=9 --max_examples=3": (
                "--max_examples does not go with --task=stdlib"
            ),
            "--task=samsum --output=o --length=9 --beam_options=x": (
                "--beam_options go with --cache_dir"
            ),
            "--task=samsum --gin_file=gin_configs/tasks/samsum.gin": (
                "--task does not go with --gin_file"
            ),
            "--task=samsum --cache_dir=c --output=o --length=9 --files=train.jsonl": (
                "c holds no complete cache of samsum.files.gpt3"
            ),
        }
    ],
)
def test_bad_input_is_refused_in_one_sentence(folder, given):
    before = sorted(folder.rglob("*"))
    results = prepare(folder, *[command.split() for command in given])
    for (status, _, err), message in zip(results, given.values(), strict=True):
        assert status == 1, err
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, err
        assert message in errors[0]
        assert "Traceback" not in err
    assert sorted(folder.rglob("*")) == before
