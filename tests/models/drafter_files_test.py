"""Block drafters on disk: round trips, and files that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bpd_jax.base.errors import UserError
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_files import attach_drafter, load_drafter, save_drafter
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import random_params

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


MODEL_PARAMS = random_params(parameter_shapes(MODEL), 0.5, 1)


@pytest.fixture(scope="module")
def trained():
    init = DrafterFunctions(CONFIG, TRUNK).init
    return random_params(jax.eval_shape(init, jax.random.key(0)), 0.5, 0)


def save(folder, trained, dtype, config=CONFIG):
    save_drafter(
        folder,
        config,
        {**trained, "vocabulary": VOCABULARY},
        dtype=dtype,
        base=fingerprint(MODEL, MODEL_PARAMS),
        base_name="tiny",
        d_model=8,
        vocab_size=19,
        facts={"steps": 3},
    )


@pytest.mark.parametrize(
    ("dtype", "error"),
    [("float32", 0), ("bfloat16", 8e-3), ("int8", 1.2e-2), ("compact", 0.2)],
)
def test_drafter_is_loaded_as_saved(tmp_path, trained, dtype, error):
    save(tmp_path / "drafter", trained, dtype)
    loaded = load_drafter(tmp_path / "drafter")
    assert "softmax" not in loaded.tensors
    assert loaded.config == CONFIG
    assert loaded.facts == {"steps": 3}
    functions, params = attach_drafter(MODEL, MODEL_PARAMS, loaded)
    assert functions == DrafterFunctions(CONFIG, TRUNK)
    softmax, vocabulary = params.pop("softmax"), params.pop("vocabulary")
    np.testing.assert_array_equal(vocabulary, VOCABULARY)
    embedding = MODEL_PARAMS["trunk"]["embedding"]
    np.testing.assert_array_equal(softmax, embedding[VOCABULARY])
    assert jax.tree.structure(params) == jax.tree.structure(trained)
    for actual, expected in zip(
        jax.tree.leaves(params), jax.tree.leaves(trained), strict=True
    ):
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(actual, expected, atol=error * scale)
    other_params = random_params(parameter_shapes(MODEL), 0.5, 2)
    with pytest.raises(UserError, match="another model"):
        attach_drafter(MODEL, other_params, loaded)
    attach_drafter(MODEL, other_params, loaded, check=False)


@pytest.mark.parametrize("name", ["mask_embedding", "fusion/kernel.scale"])
def test_tensors_of_another_shape_are_refused(tmp_path, trained, name):
    folder = tmp_path / "drafter"
    save(folder, trained, "int8")
    path = folder / "drafter.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name][..., :-1]
    save_file(tensors, path)
    with pytest.raises(UserError, match=name.removesuffix(".scale")):
        load_drafter(folder)
