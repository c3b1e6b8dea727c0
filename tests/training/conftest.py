"""A tiny model, a batch with two documents and padding, and a small corpus."""

import functools
import pathlib
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from bpd_jax.base.typing import Params
from bpd_jax.data import row_preparation
from bpd_jax.data.rows import Batch, make_batch
from bpd_jax.data.text_task import TextTask
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.parameters import abstract_parameters, init_boxed
from bpd_jax.models.partitioning import unbox
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.training import frozen, trainer, validation
from bpd_jax.training.config import OptimizerConfig, TrainConfig

VOCAB = 280


@pytest.fixture(scope="session", autouse=True)
def _equal_runs_share_their_work(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Traces, compiles and tokenizes once for runs with equal settings."""
    with pytest.MonkeyPatch.context() as patch:
        optimizers = functools.cache(trainer.make_optimizer)
        for module in (trainer, frozen):
            patch.setattr(
                module,
                "make_optimizer",
                # A constant rate does not depend on the number of steps.
                lambda config, steps: optimizers(
                    config, 1 if config.schedule == "constant" else steps
                ),
            )
        for module, name in (
            (trainer, "abstract_state"),
            (trainer, "make_train_step"),
            (frozen, "make_step"),
            (validation, "make_eval_step"),
        ):
            patch.setattr(module, name, made_once_for_equal(getattr(module, name)))
        patch.setattr(trainer, "init_state", initialized_once(trainer.init_state))
        rows = tmp_path_factory.mktemp("rows")
        patch.setattr(row_preparation, "prepare_rows", copied_rows(rows))
        yield


def initialized_once(init: Callable[..., Any]) -> Callable[..., Any]:
    """`init` with a cache, which returns copies: training donates its state."""
    cached_init = made_once_for_equal(lambda *args: jax.device_get(init(*args)))

    def get(model: Any, optimizer: Any, abstract: Any, *args: Any) -> Any:
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        return jax.device_put(cached_init(model, optimizer, abstract, *args), shardings)

    return get


def copied_rows(folder: pathlib.Path) -> Callable[..., Any]:
    """`prepare_rows` with a cache: rows of equal texts are copied, not made again."""
    original = row_preparation.prepare_rows
    copies: dict[str, pathlib.Path] = {}

    def get(task: TextTask, split: str, length: int, rows: pathlib.Path) -> Any:
        key = repr((task, row_preparation.rows_fingerprint(task, split, length)))
        if key in copies and not rows.exists():
            shutil.copytree(copies[key], rows)
        prepared = original(task, split, length, rows)
        if key not in copies:
            copies[key] = folder / str(len(copies))
            shutil.copytree(rows, copies[key])
        return prepared

    return get


def made_once_for_equal(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make` with a cache: calls with equal trees of arguments share one result."""
    results: dict[Any, Any] = {}

    @functools.wraps(make)
    def get(*args: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, options))
        key = (*leaves, tree)
        if key not in results:
            results[key] = make(*args, **options)
        return results[key]

    return get


def tiny_model(heads: int | None = 3, **kwargs: Any) -> BlockwiseConfig:
    """One layer and, unless `heads` is None, block heads with the given options."""
    trunk = TransformerConfig(VOCAB, 1, 16, 32, 4, max_length=16)
    if heads is None:
        return BlockwiseConfig(trunk)
    return BlockwiseConfig(trunk, BlockHeadsConfig(heads, 8, **kwargs))


@pytest.fixture(scope="session")
def make_model() -> Callable[..., BlockwiseConfig]:
    return tiny_model


@pytest.fixture(scope="session")
def model() -> BlockwiseConfig:
    return tiny_model()


@pytest.fixture(scope="session")
def one_device() -> Mesh:
    axes = ("data", "fsdp", "model")
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), axes)


def random_parameters(model: BlockwiseConfig, mesh: Mesh) -> Params:
    """Parameters without zeros, so that every path has a gradient."""
    rng = np.random.default_rng(1)

    def noisy(leaf: jax.Array) -> jax.Array:
        # With numpy: jax would compile several programs for every shape.
        noise = rng.normal(0, 0.2, leaf.shape).astype(leaf.dtype)
        return jax.device_put(np.asarray(leaf) + noise, leaf.sharding)

    shardings = jax.tree.map(lambda x: x.sharding, abstract_parameters(model, mesh))
    init = jax.jit(lambda key: unbox(init_boxed(model, key)), out_shardings=shardings)
    return jax.tree.map(noisy, init(jax.random.key(0)))


@pytest.fixture(scope="session")
def make_parameters() -> Callable[[BlockwiseConfig, Mesh], Params]:
    return random_parameters


@pytest.fixture(scope="session")
def params(model: BlockwiseConfig, one_device: Mesh) -> Params:
    return random_parameters(model, one_device)


@pytest.fixture(scope="session")
def batch() -> Batch:
    """Eight rows of 12 tokens: documents of 7 and 3 tokens, then padding."""
    tokens = np.random.default_rng(0).integers(1, VOCAB, (8, 12))
    segment_ids = np.tile([1] * 7 + [2] * 3 + [0] * 2, (8, 1))
    return make_batch(tokens * (segment_ids > 0), segment_ids)


@pytest.fixture(scope="session")
def text_task(tmp_path_factory: pytest.TempPathFactory) -> TextTask:
    folder: pathlib.Path = tmp_path_factory.mktemp("corpus")
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    for number in range(30):
        text = " ".join(words[(number * k) % 7] for k in range(40))
        (folder / f"{number}.txt").write_text(f"{number}: {text}\n")
    return TextTask(
        corpus="text_files",
        text_files=str(folder / "*.txt"),
        vocabulary=f"bpe:{VOCAB}",
        validation_fraction=0.2,
    )


@pytest.fixture(scope="session")
def train_config(model: BlockwiseConfig, text_task: TextTask) -> TrainConfig:
    return TrainConfig(
        model=model,
        task=text_task,
        optimizer=OptimizerConfig(
            1e-2, warmup_steps=2, weight_decay=0.1, schedule="constant"
        ),
        batch_size=8,
        length=16,
        steps=6,
        log_every=1,
        evaluate_every=4,
        checkpoint_every=3,
    )


@pytest.fixture
def stopped_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[None]]:
    """A function that makes the process get SIGTERM in the nth step of training.

    It returns a list that gets an element in every step.
    """

    def stop(number: int) -> list[None]:
        make_step, calls = frozen.make_step, []

        def stopping(*arguments: Any) -> Callable[..., Any]:
            step = make_step(*arguments)

            def counted(*state: Any) -> Any:
                calls.append(None)
                if len(calls) == number:
                    signal.raise_signal(signal.SIGTERM)
                return step(*state)

            return counted

        monkeypatch.setattr(frozen, "make_step", stopping)
        return calls

    return stop
