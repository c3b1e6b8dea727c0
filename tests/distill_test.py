"""The command that lets a model write texts: shards, going on, refusals."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from bpd_jax.data.generations import open_generations, shard_paths
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.decoding.loading import load_model
from bpd_jax.models.heads_files import fingerprint

GOLDEN = pathlib.Path(__file__).parent / "pretrained" / "golden" / "llama"


def distill(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "bpd_jax.distill", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a tiny model, prompts, and what the command wrote."""
    folder = tmp_path_factory.mktemp("distill")
    shutil.copytree(GOLDEN, folder / "tiny")
    prompts = ["a b", "c", "b a c a", "c c c", "a"]
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    arguments = [
        "--model=tiny",
        "--prompts_file=prompts.jsonl",
        "--nochat",
        "--max_new_tokens=6",
        "--batch_size=2",
        "--output=texts",
    ]
    run = distill(folder, *arguments)
    assert run.returncode == 0, run.stderr
    assert "5 texts in 3 shards: texts" in run.stdout
    return folder, arguments


def test_texts_begin_with_their_prompts(written):
    folder, _ = written
    texts = open_generations(folder / "texts")
    loaded = load_model(str(folder / "tiny"))
    assert texts.base == fingerprint(loaded.functions.config, loaded.params)
    assert texts.vocab_size == loaded.vocab_size
    assert Tokenizer.load(folder / "texts").to_json() == loaded.tokenizer.to_json()
    found = sorted(
        texts[row][:length].tolist() for row, length in enumerate(texts.prompt_lengths)
    )
    plain = loaded.without_chat()
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert found == sorted(plain.encode_prompt(text).tolist() for text in prompts)
    assert (texts.lengths - texts.prompt_lengths >= 1).all()
    assert (texts.lengths - texts.prompt_lengths <= 6).all()


def test_the_same_command_goes_on(written):
    folder, arguments = written
    before = [
        np.load(path)["tokens"].tolist() for path in shard_paths(folder / "texts")
    ]
    shard_paths(folder / "texts")[1].unlink()
    run = distill(folder, *arguments)
    assert run.returncode == 0, run.stderr
    assert "2 of 3 shards are there already." in run.stdout
    after = [np.load(path)["tokens"].tolist() for path in shard_paths(folder / "texts")]
    assert after == before


@pytest.mark.parametrize(
    "changed, message",
    [
        (["--max_new_tokens=7"], "texts made with options = "),
        (["--made_up_prompts=3"], "has no chat template"),
        (["--longest_prompt=9"], "texts made with longest_prompt = 512"),
        (["--output=short", "--longest_prompt=1"], "no prompt has 1 tokens or fewer"),
        (["--output=prompts.jsonl"], "prompts.jsonl"),
        (["--temperature=1", "--acceptance=typical"], "typical acceptance"),
        (["--prompts_file=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_does_not_fit_is_refused(written, changed, message):
    folder, arguments = written
    run = distill(folder, *arguments, *changed)
    assert run.returncode == 1
    assert message in run.stderr
    assert run.stderr.strip().splitlines()[-1].startswith("error: ")


def test_something_to_continue_must_be_given(written):
    folder, _ = written
    run = distill(folder, "--model=tiny", "--output=other")
    assert run.returncode == 1
    assert "there is nothing to continue" in run.stderr
    assert not (folder / "other").exists()
