"""A tiny random model, and texts in which each token has two possible successors."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.typing import Params
from bpd_jax.data.generations import (
    Generations,
    open_generations,
    write_header,
    write_shard,
)
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.parameters import parameter_shapes
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.heads.heads_config import HeadsTrainConfig

VOCAB, WIDTH = 61, 24
MODEL = BlockwiseConfig(TransformerConfig(VOCAB, 1, WIDTH, 32, 4, max_length=48))


def random_parameters(model: BlockwiseConfig, seed: int = 0) -> Params:
    """Parameters without zeros; embeddings of about unit size."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        mean = 1.0 if name == "scale" else 0.0
        noise = 1.0 if name in ("embedding", "softmax") else 0.1
        return jnp.asarray(rng.normal(mean, noise, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, parameter_shapes(model))


def write_texts(folder: pathlib.Path, base: str, count: int = 80) -> None:
    """Two shards of texts: a prompt of 3 tokens, then a random walk."""
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(count):
        text = [int(rng.integers(0, VOCAB))]
        for _ in range(int(rng.integers(4, 40))):
            text.append((7 * text[-1] + int(rng.integers(0, 2))) % 30)
        texts.append(np.array(text))
    write_header(folder, base=base, vocab_size=VOCAB, facts={})
    half = count // 2
    write_shard(folder, 0, texts[:half], [3] * half)
    write_shard(folder, 1, texts[half:], [3] * (count - half))


@pytest.fixture(scope="session")
def model() -> BlockwiseConfig:
    return MODEL


@pytest.fixture(scope="session")
def params() -> Params:
    return random_parameters(MODEL)


@pytest.fixture(scope="session")
def base_key(params: Params) -> str:
    return fingerprint(MODEL, params)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, base_key: str) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder, base_key)
    return folder


@pytest.fixture(scope="session")
def texts(data: pathlib.Path) -> Generations:
    return open_generations(data)


@pytest.fixture
def config(data: pathlib.Path) -> HeadsTrainConfig:
    return HeadsTrainConfig(
        model="some/folder/tiny",
        data=str(data),
        heads=BlockHeadsConfig(4, 32, draft_vocabulary=20),
        optimizer=OptimizerConfig(1e-2, warmup_steps=5),
        batch_size=128,
        epochs=15,
        held_out=0.1,
        evaluate_every=40,
        checkpoint_every=50,
    )
