"""Block drafters on disk: round trips, and files that are refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bpd_jax.errors import UserError
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_files import attach_drafter, load_drafter, save_drafter
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.transformer_config import TransformerConfig

TRUNK = TransformerConfig(19, 3, 8, 12, 2, rotary=RotaryConfig(500.0))
MODEL = BlockwiseConfig(TRUNK)
CONFIG = BlockDrafterConfig(
    feature_layers=(0, 2),
    block_size=3,
    window=5,
    draft_vocabulary=6,
    markov_rank=2,
    confidence=True,
).resolve(TRUNK)
VOCABULARY = np.array([0, 3, 4, 9, 11, 18], np.int32)


def draw(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), jnp.float32), shapes
    )


@pytest.fixture(scope="module")
def model_params():
    return draw(parameter_shapes(MODEL), 1)


@pytest.fixture(scope="module")
def trained():
    init = DrafterFunctions(CONFIG, TRUNK).init
    return draw(jax.eval_shape(init, jax.random.key(0)))


def save(folder, trained, model_params, **changes):
    arguments = {
        "base": fingerprint(MODEL, model_params),
        "base_name": "tiny",
        "d_model": 8,
        "vocab_size": 19,
        "facts": {"steps": 3},
    }
    params = {**trained, "vocabulary": VOCABULARY}
    save_drafter(folder, CONFIG, params, **(arguments | changes))


@pytest.mark.parametrize(
    ("dtype", "error"), [("float32", 0), ("bfloat16", 8e-3), ("int8", 1.2e-2)]
)
def test_drafter_is_loaded_as_saved(tmp_path, trained, model_params, dtype, error):
    save(tmp_path / "drafter", trained, model_params, dtype=dtype)
    loaded = load_drafter(tmp_path / "drafter")
    assert loaded.config == CONFIG
    assert loaded.facts == {"steps": 3}
    functions, params = attach_drafter(MODEL, model_params, loaded)
    assert functions == DrafterFunctions(CONFIG, TRUNK)
    softmax, vocabulary = params.pop("softmax"), params.pop("vocabulary")
    np.testing.assert_array_equal(vocabulary, VOCABULARY)
    embedding = model_params["trunk"]["embedding"]
    np.testing.assert_array_equal(softmax, embedding[VOCABULARY])
    assert jax.tree.structure(params) == jax.tree.structure(trained)
    for actual, expected in zip(
        jax.tree.leaves(params), jax.tree.leaves(trained), strict=True
    ):
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(actual, expected, atol=error * scale)


def test_tensors_are_named_by_their_paths(tmp_path, trained, model_params):
    save(tmp_path / "drafter", trained, model_params, dtype="int8")
    names = load_file(tmp_path / "drafter" / "drafter.safetensors").keys()
    for name in (
        "fusion/kernel",
        "fusion_norm/scale",
        "mask_embedding",
        "attention_1/query_norm/scale",
        "mlp_0/gate/kernel",
        "markov/output",
        "confidence/bias",
    ):
        assert name in names
    assert "softmax" not in names
    assert "fusion/kernel.scale" in names


def test_a_drafter_of_another_model_is_refused(tmp_path, trained, model_params):
    save(tmp_path / "drafter", trained, model_params)
    loaded = load_drafter(tmp_path / "drafter")
    other_params = draw(parameter_shapes(MODEL), 2)
    with pytest.raises(UserError, match="another model"):
        attach_drafter(MODEL, other_params, loaded)
    attach_drafter(MODEL, other_params, loaded, check=False)
    wider = BlockwiseConfig(dataclasses.replace(TRUNK, d_model=16))
    with pytest.raises(UserError, match="width 16"):
        attach_drafter(wider, draw(parameter_shapes(wider)), loaded)


@pytest.mark.parametrize(
    "damage",
    ["config", "no tensors", "shape", "scale", "vocabulary"],
)
def test_a_damaged_folder_is_refused(tmp_path, trained, model_params, damage):
    folder = tmp_path / "drafter"
    save(folder, trained, model_params, dtype="int8")
    header, path = folder / "drafter.json", folder / "drafter.safetensors"
    fields, tensors = json.loads(header.read_text()), load_file(path)
    match damage:
        case "config":
            header.write_text(json.dumps(fields | {"config": {"block_size": 3}}))
        case "no tensors":
            path.write_bytes(b"nothing")
        case "shape":
            tensors["mask_embedding"] = tensors["mask_embedding"][:-1]
        case "scale":
            tensors["fusion/kernel.scale"] = tensors["fusion/kernel.scale"][:, :1]
        case "vocabulary":
            tensors["vocabulary"] = np.array([0, 0, 1, 2, 3, 4], np.int32)
    if damage in ("shape", "scale", "vocabulary"):
        save_file(tensors, path)
    with pytest.raises(UserError):
        load_drafter(folder)
