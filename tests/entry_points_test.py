"""decode and evaluate on a model trained here, as a user calls them."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from bpd_jax.data.spec import TextTask
from bpd_jax.models.config import BlockHeadsConfig, BlockwiseConfig, TransformerConfig
from bpd_jax.ngrams.build import Settings, build
from bpd_jax.training.config import OptimizerConfig, TrainConfig
from bpd_jax.training.trainer import train

pytest.importorskip("seqio")
ROOT = pathlib.Path(__file__).parent.parent

FIELDS = [
    "prompt",
    "input_ids",
    "output_ids",
    "text",
    "serial_calls",
    "block_efficiency",
    "seconds",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with texts and `run`, a run folder with an n-gram model."""
    folder = tmp_path_factory.mktemp("entry")
    (folder / "texts").mkdir()
    for number in range(12):
        lines = [f"{number} times {k} is {number * k}." for k in range(20)]
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines))
    texts = str(folder / "texts" / "*.txt")
    config = TrainConfig(
        model=BlockwiseConfig(
            TransformerConfig(270, 1, 16, 32, num_heads=2, max_length=48),
            BlockHeadsConfig(4, hidden=8),
        ),
        task=TextTask("text_files", texts, "bpe:270", validation_fraction=0.25),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        batch_size=8,
        length=32,
        steps=60,
    )
    train(config, folder / "run")
    build(
        Settings(
            output=str(folder / "run" / "ngram"),
            text=texts,
            order=3,
            vocabulary=str(folder / "run"),
        )
    )
    return folder


def call(folder, module, *arguments):
    return subprocess.run(
        [sys.executable, "-m", f"bpd_jax.{module}", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_refused(result, message):
    """One sentence, exit status 1, no traceback."""
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert message in errors[0]


def test_decode_writes_json_lines_in_prompt_order(folder):
    (folder / "prompts.jsonl").write_text(
        '{"prompt": "3 times"}\n{"prompt": "7 times 2 is"}\n{"prompt": ""}\n'
    )
    outputs = {}
    for method, temperature in (
        ("greedy", 0),
        ("ngram:4", 0),
        ("ngram:2", 0),
        ("ngram:3", 0),
        ("greedy", 0.9),
        ("zero_gram:3", 0.9),
    ):
        result = call(
            folder,
            "decode",
            "--model=run",
            "--prompts_file=prompts.jsonl",
            f"--method={method}",
            f"--temperature={temperature}",
            "--max_new_tokens=16",
            "--batch_size=2",
            "--output=out.jsonl",
            *(["--ngram=run/ngram/model.arpa.gz"] if method == "ngram:2" else []),
            *(["--ngram=run/ngram/model.fst"] if method == "ngram:3" else []),
        )
        assert result.returncode == 0, result.stderr
        assert "block efficiency" in result.stdout
        lines = (folder / "out.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [list(record) for record in records] == [FIELDS] * 3
        prompts = [record["prompt"] for record in records]
        assert prompts == ["3 times", "7 times 2 is", ""]
        for record in records:
            efficiency = len(record["output_ids"]) / record["serial_calls"]
            assert record["block_efficiency"] == pytest.approx(efficiency)
        outputs[method, temperature] = [record["output_ids"] for record in records]
    assert outputs["greedy", 0] == outputs["ngram:4", 0]
    assert outputs["greedy", 0] == outputs["ngram:2", 0]
    assert outputs["greedy", 0] == outputs["ngram:3", 0]
    assert outputs["greedy", 0.9] == outputs["zero_gram:3", 0.9]
    assert outputs["greedy", 0] != outputs["greedy", 0.9]


def test_evaluate_proves_equality_and_writes_a_report(folder):
    result = call(
        folder,
        "evaluate",
        "--model=run",
        "--num_prompts=3",
        "--prompt_tokens=8",
        "--max_new_tokens=24",
        "--lattice_width=8",
        "--methods=bpd,zero_gram:4,ngram:1,ngram:4,oracle",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("identical") >= 5
    output = folder / "run" / "evaluation"
    report = json.loads((output / "report.json").read_text())
    names = ["greedy", "bpd", "zero_gram:4", "ngram:1", "ngram:4", "oracle"]
    assert [method["name"] for method in report["methods"]] == names
    efficiency = {m["name"]: m["block_efficiency"] for m in report["methods"]}
    assert efficiency["greedy"] == 1
    assert efficiency["oracle"] == max(efficiency.values()) > 1
    assert efficiency["zero_gram:4"] >= efficiency["bpd"]
    assert report["lattice"]["paths"][-1]["label"] == "Oracle"
    lines = (output / "records.jsonl").read_text().splitlines()
    assert len(lines) == 6 * 3
    assert "4-best 3-gram" in (output / "report.html").read_text()


def test_bad_input_is_refused_and_leaves_nothing(folder):
    base = ["--model=run", "--output=never.jsonl", "--max_new_tokens=8"]
    result = call(folder, "decode", *base, "--prompt=x", "--method=medusa")
    assert_refused(result, "unknown method 'medusa'")
    result = call(folder, "decode", *base)
    assert_refused(result, "exactly one of --prompt and --prompts_file")
    result = call(folder, "decode", *base, f"--prompt={'word ' * 60}")
    assert_refused(result, "but the model holds 48")
    shutil.copytree(folder / "run", folder / "other")
    model = json.loads((folder / "other" / "model.json").read_text())
    model["trunk"]["d_ff"] = 64
    (folder / "other" / "model.json").write_text(json.dumps(model))
    result = call(folder, "decode", *base, "--prompt=x", "--model=other")
    assert_refused(result, "mlp_0")
    keys = folder / "other" / "ngram" / "keys_2.npy"
    keys.write_bytes(keys.read_bytes()[:-8])
    result = call(
        folder, "decode", *base, "--prompt=x", "--method=ngram", "--ngram=other/ngram"
    )
    assert_refused(result, "keys_2.npy")
    arpa = folder / "other" / "cut.arpa.gz"
    whole = (folder / "run" / "ngram" / "model.arpa.gz").read_bytes()
    arpa.write_bytes(whole[: len(whole) // 2])
    result = call(
        folder, "decode", *base, "--prompt=x", "--method=ngram", f"--ngram={arpa}"
    )
    assert_refused(result, "cut.arpa.gz")
    assert not (folder / "never.jsonl").exists()
    result = call(folder, "evaluate", "--model=nowhere")
    assert_refused(result, "nowhere is not a folder")
