import dataclasses

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.rows import RowIterator, open_rows
from bpd_jax.training.distributed import LAG
from bpd_jax.training.finite_watch import FiniteWatch
from bpd_jax.training.metrics import read_rows
from bpd_jax.training.trainer import train
from tests.training.runs import parameters


def test_steps_are_checked_after_a_lag(tmp_path, batch):
    watch = FiniteWatch(tmp_path, list)
    for step, finite in enumerate([True, False, True, True], start=1):
        watch.add(step, batch, {"finite": np.bool_(finite)})
        if step < 2 + LAG:
            watch.check(all_steps=False)
    message = r"step 2 is not finite: .*step_2.npz.* starts from the beginning\.$"
    with pytest.raises(UserError, match=message):
        watch.check(all_steps=False)


def test_all_steps_are_checked_before_a_save(tmp_path, batch):
    watch = FiniteWatch(tmp_path, lambda: [2, 3])
    watch.add(4, batch, {"finite": np.bool_(False), "loss_heads": np.array([np.nan])})
    message = (
        r"step 4 .* resumes from checkpoint 3; .* remove .*/checkpoints/3 to resume "
        r"from checkpoint 2\.$"
    )
    with pytest.raises(UserError, match=message):
        watch.check(all_steps=True)
    with np.load(tmp_path / "nonfinite" / "step_4.npz") as saved:
        np.testing.assert_array_equal(saved["tokens"], batch.tokens)
        np.testing.assert_array_equal(saved["segment_ids"], batch.segment_ids)
        assert np.isnan(saved["loss_heads"]).all()


def test_diverging_run_saves_its_batch_and_can_resume(train_config, tmp_path):
    """The first steps are finite; a learning rate of 1e30 makes later ones diverge."""
    config = dataclasses.replace(train_config, steps=2, log_every=4)
    train(config, tmp_path)
    original = parameters(tmp_path)
    # After step 3 the parameters are huge, and the loss of step 4 is not a number.
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1e30)
    diverging = dataclasses.replace(
        config, optimizer=optimizer, steps=8, checkpoint_every=8, evaluate_every=8
    )
    with pytest.raises(
        UserError, match=r"step 4 .* from checkpoint 2; .* the beginning"
    ):
        train(diverging, tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2"]
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path), original)
    batches = RowIterator(open_rows(tmp_path / "data" / "train"), 8, config.seed)
    fourth = [next(batches) for _ in range(4)][-1]
    with np.load(tmp_path / "nonfinite" / "step_4.npz") as saved:
        np.testing.assert_array_equal(saved["tokens"], fourth.tokens)
        assert not saved["finite"]
        assert saved["loss_heads"].shape == (3,)
    # The same command with a usable rate resumes from the last good checkpoint.
    train(dataclasses.replace(diverging, optimizer=config.optimizer), tmp_path)
    assert read_rows(tmp_path / "metrics.jsonl")[-1]["step"] == 8
