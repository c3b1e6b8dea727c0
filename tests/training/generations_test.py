"""A small model trained on the token ids that another model generated."""

import jax
import numpy as np
import pytest

from bpd_jax.data.generations import write_header, write_shard
from bpd_jax.data.rows import open_rows
from bpd_jax.data.text_task import TextTask
from bpd_jax.data.tokenizer import Tokenizer, train_bpe
from bpd_jax.models.blockwise_config import load_config
from bpd_jax.training.config import OptimizerConfig, TrainConfig
from bpd_jax.training.exported_params import load_run_parameters
from bpd_jax.training.loss import blockwise_loss
from bpd_jax.training.trainer import train


@pytest.fixture(scope="module")
def config(make_model, tmp_path_factory):
    """Prompts of random tokens, each answered by 7 8 9 7 8 9 … 6."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    texts = [
        np.concatenate([rng.integers(10, 280, 5), np.tile([7, 8, 9], 3), [6]])
        for _ in range(60)
    ]
    write_header(
        folder, base="abc", vocab_size=280, facts={"options": {"end_of_text": 6}}
    )
    write_shard(folder, 0, texts, [5] * 60)
    train_bpe(["one two three"], 257).save(folder / "tokenizer.json")
    return TrainConfig(
        model=make_model(heads=None),
        task=TextTask("generations", str(folder), str(folder), validation_fraction=0.2),
        optimizer=OptimizerConfig(3e-2),
        batch_size=8,
        length=16,
        steps=30,
        checkpoint_every=20,
    )


def test_training_on_generations_learns(config, tmp_path):
    metrics = train(config, tmp_path / "run")
    # Prompts are random and not in the loss; the answers can be predicted.
    assert metrics["validation_loss"] < 0.5
    texts = Tokenizer.load(config.task.text_files)
    assert Tokenizer.load(tmp_path / "run").to_json() == texts.to_json()
    model = load_config(tmp_path / "run" / "model.json")
    rows = open_rows(tmp_path / "run" / "data" / "validation")
    batch = rows.batch(slice(0, 8))
    params = load_run_parameters(tmp_path / "run", model)
    _, sums = jax.jit(blockwise_loss, static_argnums=(0, 3))(
        model, params, batch, (1.0,)
    )
    # Each text has 10 tokens to learn.
    assert sums.valid.tolist() == [10 * batch.segment_ids.max(1).sum()]
