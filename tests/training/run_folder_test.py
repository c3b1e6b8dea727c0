import dataclasses
import shutil

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import write_header, write_shard
from bpd_jax.data.rows import open_rows
from bpd_jax.data.text_task import TextTask
from bpd_jax.data.tokenizer import Tokenizer, train_bpe
from bpd_jax.training.metrics import read_rows
from bpd_jax.training.run_folder import make_run_rows
from bpd_jax.training.trainer import train


@pytest.fixture(scope="module")
def first_steps(train_config, tmp_path_factory):
    """Three steps of a run on texts of its own: its configuration and the folder."""
    folder = tmp_path_factory.mktemp("begun")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(30):
        words = " ".join(f"{number * k % 7}" for k in range(60))
        (texts / f"{number}.txt").write_text(f"{number}: {words}\n")
    task = dataclasses.replace(train_config.task, text_files=str(texts / "*.txt"))
    config = dataclasses.replace(train_config, task=task, steps=3)
    train(config, folder / "run")
    shutil.copytree(folder, folder.with_name("untouched"))
    return dataclasses.replace(config, steps=6), folder


@pytest.fixture
def begun(first_steps):
    """The configuration, the run and its texts, as they were after three steps."""
    config, folder = first_steps
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("untouched"), folder)
    return config, folder / "run", folder / "texts"


def content(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_run_keeps_its_rows_when_the_text_changes(begun, capsys):
    config, run, texts = begun
    rows, vocabulary = content(run / "data"), (run / "tokenizer.json").read_bytes()
    (texts / "0.txt").write_text("something else altogether")
    train(config, run)
    printed = capsys.readouterr().out
    for split in ("train", "validation"):
        assert f"note: the text of the {split} split of {config.task.name}" in printed
    assert content(run / "data") == rows
    assert (run / "tokenizer.json").read_bytes() == vocabulary
    assert read_rows(run / "metrics.jsonl")[-1]["step"] == 6


def test_lost_rows_are_made_again(begun):
    config, run, _ = begun
    rows = content(run / "data")
    shutil.rmtree(run / "data" / "validation")
    header = run / "data" / "train" / "rows.json"
    header.write_text(header.read_text().partition('"task"')[0])
    train(config, run)
    assert content(run / "data") == rows


def test_rows_that_cannot_be_made_again_are_reported(begun):
    config, run, texts = begun
    (texts / "0.txt").write_text("something else altogether")
    (run / "data" / "train" / "tokens.npy").unlink()
    rows = content(run / "data")
    message = (
        r"data/train does not hold the rows that the run started with, .* has changed"
    )
    with pytest.raises(UserError, match=message):
        train(config, run)
    assert content(run / "data") == rows
    # Rows of another text are not accepted either.
    shutil.rmtree(run / "data")
    make_run_rows(config, run.with_name("other"))
    shutil.copytree(run.with_name("other") / "data", run / "data")
    with pytest.raises(UserError, match=message):
        train(config, run)


def test_rows_of_generations_keep_their_tokens_and_tokenizer(train_config, tmp_path):
    write_header(tmp_path, base="abc", vocab_size=280, facts={})
    texts = [np.arange(number, number + 9) for number in range(60)]
    write_shard(tmp_path, 0, texts, [5] * 60)
    train_bpe(["one two three"], 257).save(tmp_path / "tokenizer.json")
    task = TextTask("generations", *[str(tmp_path)] * 2, validation_fraction=0.2)
    run = tmp_path / "run"
    make_run_rows(dataclasses.replace(train_config, task=task), run)
    kept = Tokenizer.load(run / "data" / "train").to_json()
    assert kept == Tokenizer.load(tmp_path).to_json()
    rows = [open_rows(run / "data" / split) for split in ("train", "validation")]
    # Of each text the four tokens after the prompt are in the loss.
    masks = [each.batch(slice(None)).loss_mask.sum() for each in rows]
    assert sum(masks) == 4 * 60
