"""Heads, block drafters and refiners on disk: round trips, and what is refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bpd_jax.base.errors import UserError
from bpd_jax.models.attachment_files import (
    attach_drafter,
    attach_heads,
    check_fits,
    load_drafter,
    load_heads,
    load_refiner,
    save_drafter,
    save_heads,
    save_refiner,
)
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.block_heads import is_trained
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.parameters import parameter_shapes
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.trained_refiners import (
    MarkovConfig,
)
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import random_heads, random_params

TRUNK = TransformerConfig(40, 3, 16, 24, 4, max_length=32, rotary=RotaryConfig(500.0))
MODEL = BlockwiseConfig(TRUNK)
PARAMS, OTHER_PARAMS = (
    random_params(parameter_shapes(MODEL), 0.3, seed) for seed in (0, 7)
)
VOCABULARY = np.arange(3, 33, 3, dtype=np.int32)
FACTS = {"accuracies": [[0.5, 0.25]], "seed": 3}
HEADS = {
    "feed forward": BlockHeadsConfig(3, 8, draft_vocabulary=10),
    "whole": BlockHeadsConfig(3, 8),
    "medusa": BlockHeadsConfig(3, kind="medusa", layers=2, own_softmax=True),
}
DRAFTER = BlockDrafterConfig(
    feature_layers=(0, 2),
    block_size=3,
    window=5,
    draft_vocabulary=10,
    markov_rank=2,
    confidence=True,
).resolve(TRUNK)
REFINER = MarkovConfig(40, 16, 4, rank=5)


def base():
    return {
        "base": fingerprint(MODEL, PARAMS),
        "base_name": "smol",
        "d_model": 16,
        "vocab_size": 40,
        "facts": FACTS,
    }


@functools.cache
def trained(config):
    return random_heads(MODEL, PARAMS, config, VOCABULARY)


def write_heads(folder, config=HEADS["feed forward"], dtype="float32", **changes):
    save_heads(folder, config, {**trained(config), **changes}, dtype=dtype, **base())


@functools.cache
def trained_drafter():
    init = DrafterFunctions(DRAFTER, TRUNK).init
    return random_params(jax.eval_shape(init, jax.random.key(0)), 0.5, 0)


def write_drafter(folder, dtype="float32"):
    params = {**trained_drafter(), "vocabulary": VOCABULARY}
    save_drafter(folder, DRAFTER, params, dtype=dtype, **base())


def write_refiner(folder):
    params = REFINER.init(jax.random.key(0))
    save_refiner(folder, REFINER, params, FACTS, base()["base"])
    return params


FILES = {
    "heads": (write_heads, load_heads),
    "drafter": (write_drafter, load_drafter),
    "refiner": (write_refiner, load_refiner),
}


def change_header(path, change):
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "dtype, error", [("float32", 0), ("bfloat16", 2**-7), ("int8", 1 / 127)]
)
@pytest.mark.parametrize("name", HEADS)
def test_attached_heads_equal_those_saved(tmp_path, name, dtype, error):
    config = HEADS[name]
    write_heads(tmp_path / "heads", config, dtype)
    loaded = load_heads(tmp_path / "heads")
    assert ("softmax" in loaded.tensors) == config.own_softmax
    assert (loaded.config, loaded.facts, loaded.base_name) == (config, FACTS, "smol")
    model, params = attach_heads(MODEL, PARAMS, loaded)
    assert model == BlockwiseConfig(TRUNK, config)
    assert params["trunk"] is PARAMS["trunk"]
    assert params["heads"].keys() == trained(config).keys()
    for key, value in trained(config).items():
        attached = params["heads"][key]
        assert attached.dtype == value.dtype
        if not is_trained(config, key):
            np.testing.assert_array_equal(attached, value)
            continue
        # int8: an error of half a step of 1/127 of the channel's largest value.
        largest = jnp.abs(value).max() if dtype == "int8" else jnp.abs(value)
        assert (jnp.abs(attached - value) <= error * largest / 2 + 1e-7).all(), key


@pytest.mark.parametrize("dtype, error", [("float32", 0), ("compact", 0.2)])
def test_an_attached_drafter_equals_that_saved(tmp_path, dtype, error):
    write_drafter(tmp_path / "drafter", dtype)
    loaded = load_drafter(tmp_path / "drafter")
    assert "softmax" not in loaded.tensors
    assert (loaded.config, loaded.facts) == (DRAFTER, FACTS)
    functions, params = attach_drafter(MODEL, PARAMS, loaded)
    assert functions == DrafterFunctions(DRAFTER, TRUNK)
    softmax, vocabulary = params.pop("softmax"), params.pop("vocabulary")
    np.testing.assert_array_equal(vocabulary, VOCABULARY)
    np.testing.assert_array_equal(softmax, PARAMS["trunk"]["embedding"][VOCABULARY])
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(
            got, want, atol=error * float(jnp.abs(want).max())
        ),
        params,
        trained_drafter(),
    )
    with pytest.raises(UserError, match="another model"):
        attach_drafter(MODEL, OTHER_PARAMS, loaded)


def test_a_loaded_refiner_equals_that_saved(tmp_path):
    params = write_refiner(tmp_path / "refiner")
    loaded = load_refiner(tmp_path / "refiner")
    assert (loaded.config, loaded.facts) == (REFINER, FACTS)
    assert loaded.base == base()["base"]
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    # Files of the first version have no base.
    change_header(tmp_path / "refiner" / "refiner.json", lambda x: x.pop("base"))
    assert load_refiner(tmp_path / "refiner").base is None


def test_fingerprints_tell_models_apart():
    key = fingerprint(MODEL, PARAMS)
    assert len(key) == 16
    assert fingerprint(MODEL, OTHER_PARAMS) != key
    # Heads and precision do not matter.
    half_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    trunk = dataclasses.replace(TRUNK, dtype="bfloat16", param_dtype="bfloat16")
    heads = BlockwiseConfig(trunk, HEADS["whole"])
    assert fingerprint(heads, {**half_params, "heads": trained(HEADS["whole"])}) == key
    on_host = jax.tree.map(np.asarray, PARAMS)
    assert fingerprint(MODEL, on_host) == key
    # A single changed tensor does, and so does the configuration.
    trunk = {**PARAMS["trunk"], "embedding": PARAMS["trunk"]["embedding"] + 0.1}
    assert fingerprint(MODEL, {"trunk": trunk}) != key
    other_trunk = dataclasses.replace(TRUNK, norm_epsilon=1e-6)
    assert fingerprint(BlockwiseConfig(other_trunk), PARAMS) != key


def test_heads_of_another_model_are_refused(tmp_path):
    write_heads(tmp_path / "heads")
    loaded = load_heads(tmp_path / "heads")
    message = rf"trained on smol .*, and big .* is another.* remove {loaded.folder}"
    with pytest.raises(UserError, match=message):
        attach_heads(MODEL, OTHER_PARAMS, loaded, name="big")
    # They are attached in the precision of the model.
    half = BlockwiseConfig(dataclasses.replace(TRUNK, param_dtype="bfloat16"))
    half_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), OTHER_PARAMS)
    _, params = attach_heads(half, half_params, loaded, base=loaded.base)
    np.testing.assert_array_equal(
        params["heads"]["softmax"], half_params["trunk"]["embedding"][VOCABULARY]
    )
    dtypes = {name: value.dtype.name for name, value in params["heads"].items()}
    assert dtypes.pop("vocabulary") == "int32"
    assert set(dtypes.values()) == {"bfloat16"}
    trunk = dataclasses.replace(TRUNK, vocab_size=41)
    with pytest.raises(UserError, match="smol, of width 16 and 40 tokens, and big has"):
        attach_heads(BlockwiseConfig(trunk), PARAMS, loaded, name="big")


def test_heads_that_cannot_be_kept_are_not_written(tmp_path):
    config = dataclasses.replace(HEADS["whole"], first_has_ffn=True)
    with pytest.raises(UserError, match="would change head 1"):
        write_heads(tmp_path / "heads", config)
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("heads", {"hidden": 9}, r"its shape is \[2, 16, 8\], not \[2, 16, 9\]"),
        ("heads", {"first_has_ffn": True}, r"heads\.json .* would change head 1"),
        ("refiner", {"rank": 6}, r"shape is \[40, 5\], not .*runs/refiner\.gin"),
    ],
)
def test_inconsistent_headers_are_refused(tmp_path, kind, changes, message):
    write, load = FILES[kind]
    write(tmp_path / kind)
    header = tmp_path / kind / f"{kind}.json"
    change_header(header, lambda fields: fields["config"].update(changes))
    with pytest.raises(UserError, match=f"(?s){message}"):
        load(tmp_path / kind)


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("heads", {"vocabulary": np.full(10, 3, np.int32)}, "distinct tokens below 40"),
        ("drafter", {"mask_embedding": np.ones(3, np.float32)}, "mask_embedding"),
    ],
)
def test_inconsistent_tensors_are_refused(tmp_path, kind, changes, message):
    write, load = FILES[kind]
    write(tmp_path / kind)
    path = tmp_path / kind / f"{kind}.safetensors"
    save_file(load_file(path) | changes, path)
    with pytest.raises(UserError, match=message):
        load(tmp_path / kind)


def test_a_refiner_fits_its_own_model_only():
    names = ("vocab_size", "d_model", "block_size")
    check_fits(REFINER, **dict(zip(names, (40, 16, 4), strict=True)))
    for sizes in ((41, 16, 4), (40, 17, 4), (40, 16, 5)):
        with pytest.raises(
            UserError, match=r"40 tokens, width 16 and 4 heads.*refiner.gin"
        ):
            check_fits(REFINER, **dict(zip(names, sizes, strict=True)))
