import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bpd_jax.base.errors import UserError
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.block_heads import is_trained
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.heads_files import attach_heads, load_heads, save_heads
from bpd_jax.models.model import Model
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import random_heads, random_params

MODEL = BlockwiseConfig(TransformerConfig(40, 1, 16, 24, 4, max_length=32))
VOCABULARY = np.arange(3, 33, 3, dtype=np.int32)
HEADS = {
    "feed forward": BlockHeadsConfig(3, 8, draft_vocabulary=10),
    "whole": BlockHeadsConfig(3, 8),
    "medusa": BlockHeadsConfig(3, kind="medusa", layers=2, own_softmax=True),
}
# Compiled as a whole: operation by operation it would take longer.
block_candidates = jax.jit(Model.block_candidates, static_argnums=(2, 3))
FACTS = {"accuracies": [[0.5, 0.25]], "seed": 3}


PARAMS = random_params(parameter_shapes(MODEL), 0.3, 0)


def trained(config):
    return random_heads(MODEL, PARAMS, config, VOCABULARY)


def save(folder, config, heads, **kwargs):
    base = {"base": fingerprint(MODEL, PARAMS), "base_name": "smol"}
    sizes = {"d_model": 16, "vocab_size": 40}
    save_heads(folder, config, heads, **{**base, **sizes, "facts": FACTS, **kwargs})


@pytest.mark.parametrize(
    "dtype, error", [("float32", 0), ("bfloat16", 2**-7), ("int8", 1 / 127)]
)
@pytest.mark.parametrize("name", HEADS)
def test_attached_equals_saved(tmp_path, name, dtype, error):
    config = HEADS[name]
    heads = trained(config)
    save(tmp_path / "heads", config, heads, dtype=dtype)
    loaded = load_heads(tmp_path / "heads")
    assert ("softmax" in loaded.tensors) == config.own_softmax
    assert (loaded.config, loaded.facts, loaded.base_name) == (config, FACTS, "smol")
    model, params = attach_heads(MODEL, PARAMS, loaded)
    assert model == BlockwiseConfig(MODEL.trunk, config)
    assert params["trunk"] is PARAMS["trunk"]
    assert params["heads"].keys() == heads.keys()
    for key, value in heads.items():
        attached = params["heads"][key]
        assert attached.dtype == value.dtype
        if not is_trained(config, key):
            np.testing.assert_array_equal(attached, value)
            continue
        # int8: an error of half a step of 1/127 of the channel's largest value.
        largest = jnp.abs(value).max() if dtype == "int8" else jnp.abs(value)
        assert bool((jnp.abs(attached - value) <= error * largest / 2 + 1e-7).all()), (
            key
        )
    hidden = random_params(jax.ShapeDtypeStruct((4, 16), jnp.float32), 0.3, 2)
    functions = Model(model)
    got = block_candidates(functions.with_params(params), hidden, 3, 3)
    want = block_candidates(
        functions.with_params({**PARAMS, "heads": heads}), hidden, 3, 3
    )
    np.testing.assert_allclose(got[1], want[1], atol=20 * error + 1e-6)


def test_every_output_channel_has_a_scale(tmp_path):
    config = HEADS["whole"]
    heads = trained(config)
    # One channel a thousand times larger than the others.
    kernel = heads["kernel_in"].at[:, :, 3].multiply(1000)
    save(tmp_path / "heads", config, {**heads, "kernel_in": kernel}, dtype="int8")
    loaded = load_heads(tmp_path / "heads").tensors["kernel_in"]
    error = np.abs(loaded - kernel).max((0, 1))
    assert error[3] > 0.05
    assert np.delete(error, 3).max() < 0.01


def test_fingerprints_tell_models_apart():
    key = fingerprint(MODEL, PARAMS)
    assert len(key) == 16
    other_params = random_params(parameter_shapes(MODEL), 0.3, 7)
    assert fingerprint(MODEL, other_params) != key
    # Heads and precision do not matter.
    half_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    trunk = dataclasses.replace(MODEL.trunk, dtype="bfloat16", param_dtype="bfloat16")
    heads = BlockwiseConfig(trunk, HEADS["whole"])
    assert fingerprint(heads, {**half_params, "heads": trained(HEADS["whole"])}) == key
    on_host = jax.tree.map(np.asarray, PARAMS)
    assert fingerprint(MODEL, on_host) == key
    # A single changed tensor does, and so does the configuration.
    trunk = {**PARAMS["trunk"], "embedding": PARAMS["trunk"]["embedding"] + 0.1}
    assert fingerprint(MODEL, {"trunk": trunk}) != key
    other_trunk = dataclasses.replace(MODEL.trunk, norm_epsilon=1e-6)
    assert fingerprint(BlockwiseConfig(other_trunk), PARAMS) != key


def test_heads_of_another_model_are_refused(tmp_path):
    config = HEADS["feed forward"]
    save(tmp_path / "heads", config, trained(config))
    loaded = load_heads(tmp_path / "heads")
    other_params = random_params(parameter_shapes(MODEL), 0.3, 7)
    message = rf"trained on smol .*, and big .* is another.* remove {loaded.folder}"
    with pytest.raises(UserError, match=message):
        attach_heads(MODEL, other_params, loaded, name="big")
    # They may be attached all the same, in the precision of the model.
    half = BlockwiseConfig(dataclasses.replace(MODEL.trunk, param_dtype="bfloat16"))
    half_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), other_params)
    _, params = attach_heads(half, half_params, loaded, check=False)
    np.testing.assert_array_equal(
        params["heads"]["softmax"], half_params["trunk"]["embedding"][VOCABULARY]
    )
    dtypes = {name: value.dtype.name for name, value in params["heads"].items()}
    assert dtypes.pop("vocabulary") == "int32"
    assert set(dtypes.values()) == {"bfloat16"}
    trunk = dataclasses.replace(MODEL.trunk, vocab_size=41)
    with pytest.raises(UserError, match="smol, of width 16 and 40 tokens, and big has"):
        attach_heads(BlockwiseConfig(trunk), PARAMS, loaded, name="big", check=False)


def test_heads_that_change_head_1_are_refused(tmp_path):
    config = BlockHeadsConfig(3, 8)
    with_first = dataclasses.replace(config, first_has_ffn=True)
    with pytest.raises(UserError, match="would change head 1"):
        save(tmp_path / "first", with_first, trained(with_first))
    assert not (tmp_path / "first").exists()
    save(tmp_path / "heads", config, trained(config))
    header = tmp_path / "heads" / "heads.json"
    fields = json.loads(header.read_text())
    fields["config"]["first_has_ffn"] = True
    header.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"heads\.json .* would change head 1"):
        load_heads(tmp_path / "heads")


def test_identity_depends_on_the_parameters(tmp_path):
    config = HEADS["feed forward"]
    heads = trained(config)
    for name, bias in (("a", 0), ("b", 0), ("c", 1)):
        save(tmp_path / name, config, {**heads, "bias_in": heads["bias_in"] + bias})
    a, b, c = (load_heads(tmp_path / name).identity for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden": 9}, r"kernel_in: its shape is \[2, 16, 8\], not \[2, 16, 9\]"),
        ({"kind": "other"}, r"cannot read .*heads\.json .*kind"),
    ],
)
def test_configuration_must_fit_the_tensors(tmp_path, fields, message):
    save(tmp_path / "heads", HEADS["feed forward"], trained(HEADS["feed forward"]))
    path = tmp_path / "heads" / "heads.json"
    header = json.loads(path.read_text())
    header["config"] |= fields
    path.write_text(json.dumps(header))
    with pytest.raises(UserError, match=message):
        load_heads(tmp_path / "heads")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocabulary": np.array([3] * 10, np.int32)}, "distinct tokens below 40"),
        ({"vocabulary": np.arange(31, 41, dtype=np.int32)}, "distinct tokens below 40"),
        (
            dict.fromkeys(("bias_in", "bias_in.scale"), np.ones(3, np.float32)),
            "the scales of bias_in have shape",
        ),
    ],
)
def test_inconsistent_tensors_are_refused(tmp_path, changes, message):
    save(tmp_path / "heads", HEADS["feed forward"], trained(HEADS["feed forward"]))
    path = tmp_path / "heads" / "heads.safetensors"
    save_file(load_file(path) | changes, path)
    with pytest.raises(UserError, match=message):
        load_heads(tmp_path / "heads")


def test_an_unknown_precision_is_refused(tmp_path):
    with pytest.raises(UserError, match="int4"):
        save(tmp_path / "h", HEADS["whole"], trained(HEADS["whole"]), dtype="int4")
    assert not (tmp_path / "h").exists()
