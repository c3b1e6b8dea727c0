import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.model import Model
from bpd_jax.training.heads import states_files
from bpd_jax.training.heads.batches import PositionBatcher
from bpd_jax.training.heads.frozen_states import FrozenModel
from bpd_jax.training.heads.states_cache import cached_states, open_states
from bpd_jax.training.heads.states_files import HEADER, StatesFile


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(states_files, "_BLOCK_BYTES", 300 * 2 * 24)


@pytest.fixture
def make(model, params, texts, base_key):
    """`cached_states` of all texts, or of others, in a folder."""

    def cached(folder, texts=texts, key=base_key, dtype="float16", **options):
        products = options.pop("products", "float32")
        base = FrozenModel(
            model, options.pop("params", params), 128, dtype, (), products
        )
        options = {"include_prompts": False, **options}
        return cached_states(folder, texts, base, key, **options)

    return cached


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cached_states_equal_those_of_the_model(
    tmp_path, model, params, texts, dtype, make
):
    states = make(tmp_path, dtype=dtype)
    assert len(StatesFile(tmp_path).blocks) > 2
    positions = states.positions
    forward = jax.jit(Model.forward)
    for row in (0, 17, len(texts) - 1):
        text = jnp.asarray(texts[row])[None]
        token_positions = jnp.arange(text.shape[1])[None]
        mask = causal_mask(jnp.ones_like(text))
        want = forward(Model(model, params), text, token_positions, mask)[0][0]
        indices = np.arange(positions.starts[row], positions.starts[row + 1])
        # From the last token of the prompt to the last but one of the text.
        np.testing.assert_allclose(
            states.read(indices).astype(np.float32), want[2:-1], atol=2e-2
        )
    sample = np.random.default_rng(0).integers(0, len(positions), 50)
    all_states = states.read(np.arange(len(positions)))
    np.testing.assert_array_equal(states.read(sample), all_states[sample])


def test_killed_run_resumes_at_the_first_missing_block(
    tmp_path, monkeypatch, texts, base_key, make
):
    uninterrupted = make(tmp_path / "whole")
    original_states = FrozenModel.states
    calls = []

    def failing(self, texts):
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        yield from original_states(self, texts)

    monkeypatch.setattr(FrozenModel, "states", failing)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "killed")
    # What a run writes of a block before it is killed is overwritten.
    with (tmp_path / "killed" / "states.npy").open("ab") as stream:
        stream.write(bytes(1000))
    assert len(StatesFile(tmp_path / "killed").blocks) == 2
    with pytest.raises(UserError, match=r"texts\.npz"):
        open_states(tmp_path / "killed", base_key)
    resumed = make(tmp_path / "killed")
    assert len(calls) - 3 == len(StatesFile(tmp_path / "whole").blocks) - 2
    indices = np.arange(len(uninterrupted.positions))
    np.testing.assert_array_equal(resumed.read(indices), uninterrupted.read(indices))


def test_appended_texts_need_their_own_states_alone(
    tmp_path, monkeypatch, texts, base_key, make
):
    make(tmp_path, fewer_texts(texts, 60))
    before = StatesFile(tmp_path).blocks
    states = make(tmp_path)
    after = StatesFile(tmp_path).blocks
    assert after[: len(before)] == before
    assert sum(block.texts for block in after) == len(texts)
    reopened = open_states(tmp_path, base_key)
    indices = np.arange(len(states.positions))
    np.testing.assert_array_equal(reopened.read(indices), states.read(indices))
    np.testing.assert_array_equal(reopened.positions.places, states.positions.places)


def test_states_without_those_of_prompts(tmp_path, model, texts, base_key, make):
    """Refiners take the next tokens for the model's own, unlike those of prompts."""
    generated = make(tmp_path / "generated")
    make(tmp_path / "all", include_prompts=True)
    reopened = open_states(tmp_path / "all", base_key)
    np.testing.assert_array_equal(reopened.positions.places, generated.positions.places)
    indices = np.arange(len(generated.positions))
    # The texts were computed in other batches.
    np.testing.assert_allclose(
        reopened.read(indices), generated.read(indices), rtol=2e-3, atol=1e-3
    )


def fewer_texts(texts, count):
    return dataclasses.replace(
        texts,
        tokens=texts.tokens[: texts.offsets[count]],
        offsets=texts.offsets[: count + 1],
        prompt_lengths=texts.prompt_lengths[:count],
    )


def test_states_of_other_texts_are_not_overwritten(tmp_path, texts, base_key, make):
    make(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    others = [
        dataclasses.replace(texts, tokens=(texts.tokens + 1) % 30),
        dataclasses.replace(texts, prompt_lengths=texts.prompt_lengths * 0 + 1),
        fewer_texts(texts, 30),
    ]
    for other_texts in others:
        with pytest.raises(UserError, match="holds states of other texts"):
            make(tmp_path, other_texts)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times
    open_states(tmp_path, base_key)


@pytest.mark.parametrize("damage", ["cut", "no prompt_lengths"])
def test_damaged_cache_is_reported(tmp_path, texts, base_key, damage, make):
    make(tmp_path)
    texts_file = tmp_path / "texts.npz"
    if damage == "cut":
        texts_file.write_bytes(texts_file.read_bytes()[:-100])
    else:
        np.savez(texts_file, tokens=texts.tokens, offsets=texts.offsets)
    with pytest.raises(UserError, match="cannot read"):
        open_states(tmp_path, base_key)
    # Another run repairs it from the existing states.
    make(tmp_path)
    open_states(tmp_path, base_key)


def test_a_forged_header_is_refused(tmp_path, base_key, make):
    make(tmp_path)
    header = json.loads((tmp_path / HEADER).read_text())
    for change in (
        {"d_model": 0},
        {"layers": ["0"]},
        {"dtype": "float64"},
        {"include_prompts": 1},
        {"blocks": [{"texts": 1}]},
        {"version": 1},
    ):
        (tmp_path / HEADER).write_text(json.dumps(header | change))
        for read in (make, lambda folder: open_states(folder, base_key)):
            with pytest.raises(UserError, match=r"states\.json"):
                read(tmp_path)


def test_states_of_another_model_are_refused(tmp_path, base_key, make):
    make(tmp_path)
    with pytest.raises(UserError, match=f"states with base = '{base_key}'.*'other'"):
        make(tmp_path, key="other")
    with pytest.raises(UserError, match="include_prompts"):
        make(tmp_path, include_prompts=True)
    with pytest.raises(UserError, match="with base"):
        open_states(tmp_path, "other")


def change_header(folder, **changes):
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps(header | changes))


@pytest.mark.parametrize("products", ["float32", "int8"])
def test_products_of_another_precision_serve_runs_in_bfloat16(tmp_path, make, products):
    """`distill --precision=int8` writes integers; what is missing is computed."""
    make(tmp_path)
    change_header(tmp_path, products=products)
    header = json.loads((tmp_path / HEADER).read_text())
    change_header(tmp_path, blocks=header["blocks"][:-1])
    make(tmp_path, products="bfloat16")
    assert json.loads((tmp_path / HEADER).read_text()) == header


@pytest.mark.parametrize("products", ["bfloat16", "int8"])
def test_rounded_products_do_not_serve_runs_in_float32(tmp_path, make, products):
    make(tmp_path)
    change_header(tmp_path, products=products)
    with pytest.raises(UserError, match=rf"products = '{products}'.*needs 'float32'"):
        make(tmp_path)


def test_full_disk_is_reported_before_anything_is_computed(tmp_path, monkeypatch, make):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="GB free: free space"):
        make(tmp_path / "states")
    assert not (tmp_path / "states").exists()


def test_states_too_large_for_float16_are_reported(tmp_path, params, make):
    trunk = params["trunk"]
    scale = {**trunk["final_norm"], "scale": trunk["final_norm"]["scale"] * 1e6}
    large = {"trunk": {**trunk, "final_norm": scale}}
    with pytest.raises(UserError, match="bfloat16"):
        make(tmp_path, params=large)
    make(tmp_path, params=large, dtype="bfloat16")


def test_too_long_texts_are_reported(model, params):
    base = FrozenModel(model, params, 128, "float16")
    with pytest.raises(UserError, match=r"49 tokens, which exceeds .* 48"):
        list(base.states([np.zeros(49, np.int32)]))


def test_batches_resume_at_any_step(tmp_path, texts, make):
    states = make(tmp_path)
    indices = np.arange(3, len(states.positions))
    batcher = PositionBatcher(states, 100, 4)
    source = batcher.batches(indices, 0)
    batches = [next(source) for _ in range(30)]
    per_epoch = len(indices) // 100
    assert 10 < per_epoch < 25
    later = batcher.batches(indices, 0, per_epoch + 3)
    for got, want in zip(next(later), batches[per_epoch + 3], strict=True):
        np.testing.assert_array_equal(got, want)
    assert batches[0].states.shape == (100, 24)
    assert batches[0].tokens.shape == batches[0].valid.shape == (100, 4)
    # Each state is paired with the tokens that follow it.
    position = states.positions.places[7]
    state = states.read(np.array([7]))[0]
    for batch in batches[:per_epoch]:
        for row in np.flatnonzero((batch.states == state).all(1)):
            assert batch.tokens[row, 0] == texts.tokens[position + 1]
