"""Import of published block drafters, and export of ours.

The logits of `golden_drafters` were computed by the authors' code; see
`scripts/golden/drafters.py`.
"""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bpd_jax.base.errors import UserError
from bpd_jax.formats.drafter_export import check_exportable, export_drafter
from bpd_jax.formats.drafter_import import import_drafter, import_eagle
from bpd_jax.models.attachment_files import attach_drafter, load_drafter, save_drafter
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions, markov_refiner
from bpd_jax.models.parameters import parameter_shapes
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.trained_refiners import markov_factors, markov_scores
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import random_params

GOLDEN = pathlib.Path(__file__).parent / "golden_drafters"
NAMES = sorted(
    path.name
    for path in GOLDEN.iterdir()
    if path.is_dir() and not path.name.startswith("eagle3")
)
# No layout that bpd_jax writes describes those of DFlash2.
EXPORTED = [name for name in NAMES if name != "dflash2"]
MODEL = BlockwiseConfig(
    TransformerConfig(
        24, 4, 8, 12, 2, norm="rms", rotary=RotaryConfig(), tied_softmax=False
    )
)
# A draft vocabulary, a Markov head that the confidence head reads, YaRN.
RICHEST = "speculators_dspark"


@functools.cache
def expected(name):
    with np.load(GOLDEN / name / "expected.npz") as arrays:
        return dict(arrays)


@functools.cache
def model_params():
    return random_params(parameter_shapes(MODEL), 0.3, 0)


def target_params(name):
    """Of a model that has the embedding and the softmax of a golden drafter."""
    tables = {key: jnp.asarray(expected(name)[key]) for key in ("embedding", "softmax")}
    return {"trunk": {**model_params()["trunk"], **tables}}


def load(folder, name):
    params = target_params(name)
    drafter = import_drafter(folder, MODEL, params, name="tiny")
    return drafter, *attach_drafter(MODEL, params, drafter)


def load_eagle(folder, name):
    return import_eagle(folder, MODEL, target_params(name), "tiny")


def drafter_logits(functions, params, name):
    """Logits `[A, L-1, V']` as decoding computes them, and of the confidence head."""
    arrays = expected(name)
    anchors, tokens = arrays["anchors"], arrays["tokens"]
    features = jnp.stack([arrays["features"]] * len(anchors))
    length = len(tokens)
    cache = functions.prefill(params, features, jnp.asarray(anchors), length)
    states = functions.states(params, cache, arrays["embedding"][tokens[anchors]])
    logits = functions.logits(params, states)
    levels = np.arange(functions.config.block_size - 1)
    previous = tokens[anchors[:, None] + levels]
    if functions.config.markov_rank:
        _, head = markov_refiner(functions, params)
        choices = params.get("vocabulary", jnp.arange(logits.shape[-1]))
        choices = jnp.broadcast_to(choices, logits.shape)
        factors = markov_factors(head, states)
        score = jax.vmap(markov_scores, in_axes=(None, 1, 1, None, 1), out_axes=1)
        previous_of_one = previous[..., None]
        logits += score(head, previous_of_one, choices[:, :, None], 1, factors)[:, :, 0]
    confidence = None
    if functions.config.confidence:
        confidence = functions.confidence_logits(params, states, previous)
    return logits, confidence


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_reference(name):
    arrays = expected(name)
    _, functions, params = load(GOLDEN / name, name)
    compute = jax.jit(functools.partial(drafter_logits, functions, name=name))
    logits, confidence = compute(params)
    np.testing.assert_allclose(logits, arrays["logits"], atol=1e-4, rtol=1e-4)
    assert ("confidence" in arrays) == (confidence is not None)
    if confidence is not None:
        np.testing.assert_allclose(
            confidence, arrays["confidence"], atol=1e-4, rtol=1e-4
        )


def export(folder, drafter, params, dtype="float32"):
    export_drafter(
        folder, MODEL, params, drafter, base="org/tiny", mask_token=23, dtype=dtype
    )
    return folder


@pytest.mark.parametrize("name", EXPORTED)
def test_drafters_round_trip(tmp_path, name):
    first, functions, params = load(GOLDEN / name, name)
    export(tmp_path / "out", first, target_params(name))
    second, read_functions, read_params = load(tmp_path / "out", name)
    assert (second.config, read_functions) == (first.config, functions)
    assert jax.tree.structure(read_params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, read_params, params)


def test_separate_softmax_is_kept(tmp_path):
    softmax = load_file(GOLDEN / RICHEST / "model.safetensors")["lm_head.weight"] * 2
    own = with_tensors(tmp_path / "own", RICHEST, {"lm_head.weight": softmax})
    drafter, _, params = load(own, RICHEST)
    np.testing.assert_array_equal(params["softmax"], softmax)
    assert "softmax" not in load(GOLDEN / RICHEST, RICHEST)[0].tensors
    export(tmp_path / "out", drafter, target_params(RICHEST))
    np.testing.assert_array_equal(
        load(tmp_path / "out", RICHEST)[2]["softmax"], softmax
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A drafter in our format: int8, with an unsorted draft vocabulary."""
    folder = tmp_path_factory.mktemp("trained") / "drafter"
    config = BlockDrafterConfig(
        feature_layers=(1, 3),
        block_size=4,
        window=6,
        draft_vocabulary=5,
        markov_rank=2,
        confidence=True,
    ).resolve(MODEL.trunk)
    shapes = jax.eval_shape(
        DrafterFunctions(config, MODEL.trunk).init, jax.random.key(0)
    )
    params = random_params(shapes, 0.5, 3)
    params["vocabulary"] = np.array([7, 3, 19, 22, 2], np.int32)
    save_drafter(
        folder,
        config,
        params,
        base=fingerprint(MODEL, model_params()),
        base_name="tiny",
        d_model=8,
        vocab_size=24,
        facts={},
        dtype="int8",
    )
    return folder


def test_trained_drafter_is_exported(tmp_path, trained):
    params, first = model_params(), load_drafter(trained)
    export(tmp_path / "out", first, params)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert all(value.dtype != np.int8 for value in tensors.values())
    # Sorted ids, stored as offsets from 0, 1, 2, …
    assert (tensors["d2t"] + np.arange(5)).tolist() == [2, 3, 7, 19, 22]
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), [2, 3, 7, 19, 22])
    assert tensors["embed_tokens.weight"].shape == (24, 8)
    second = import_drafter(tmp_path / "out", MODEL, params)
    assert second.config == first.config
    order = np.argsort(first.tensors["vocabulary"])
    for name, value in first.tensors.items():
        if name in ("vocabulary", "markov/output"):
            value = value[order]
        np.testing.assert_array_equal(second.tensors[name], value, err_msg=name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["block_size"] == 3
    assert config["sample_from_anchor"] is True
    assert config["aux_hidden_state_layer_ids"] == [2, 4]
    assert config["sliding_window_non_causal"] is True
    half = export(tmp_path / "half", first, params, dtype="bfloat16")
    rounded = import_drafter(half, MODEL, params).tensors["fusion/kernel"]
    expected = first.tensors["fusion/kernel"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(rounded.astype(jnp.bfloat16), expected)


def test_rotary_settings_round_trip(tmp_path, trained):
    """A golden drafter has YaRN."""
    linear = RotaryConfig(700.0, scaling="linear", factor=2.0)
    for rotary in (linear, RotaryConfig(1e4, 1.0, "llama3", 8.0, 32, 1.0, 4.0)):
        drafter = load_drafter(trained)
        config = dataclasses.replace(drafter.config, rotary=rotary)
        changed = dataclasses.replace(drafter, config=config)
        folder = export(tmp_path / rotary.scaling, changed, model_params())
        assert import_drafter(folder, MODEL, model_params()).config.rotary == rotary


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_key_norm": False}, "query_key_norm"),
        ({"reads_last_token": True}, "reads_last_token"),
        ({"convolution_taps": 2}, "DFlash2"),
        ({"activation": "gelu"}, "gelu"),
        ({"rotary": RotaryConfig(fraction=0.5)}, "rotary"),
    ],
)
def test_unsupported_drafters_are_not_exported(changes, message):
    with pytest.raises(UserError, match=message):
        check_exportable(BlockDrafterConfig((0,), **changes))
    check_exportable(BlockDrafterConfig((0,)))


LAYERS = "transformer_layer_config"
EAGLE_IDS = "eagle_aux_hidden_state_layer_ids"
WINDOW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}


def changed_copy(folder, name, changes):
    shutil.copytree(GOLDEN / name, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for field, value in changes.items():
        nested = isinstance(value, dict) and field in config
        config[field] = {**config[field], **value} if nested else value
    path.write_text(json.dumps(config))
    return folder


def test_positions_are_those_of_the_kind_of_all_layers(tmp_path):
    name = "speculators_dspark_window"
    kinds = {
        "full_attention": {"rope_theta": 9.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 500.0, "rope_type": "default"},
    }
    layers = json.loads((GOLDEN / name / "config.json").read_text())
    layers = {**layers["transformer_layer_config"], "rope_parameters": kinds}
    changed = {"transformer_layer_config": layers}
    folder = changed_copy(tmp_path / "changed", name, changed)
    assert load(folder, name)[0].config == load(GOLDEN / name, name)[0].config


def with_tensors(folder, name, changes):
    """A copy of a golden drafter with other tensors, or without those that are None."""
    shutil.copytree(GOLDEN / name, folder)
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path)
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (RICHEST, {"speculators_model_type": "dflash2"}, "dflash2"),
        (RICHEST, {"markov_head_type": "gated"}, "gated"),
        (RICHEST, {LAYERS: {"model_type": "gemma3"}}, "gemma3"),
        (RICHEST, {"aux_hidden_state_layer_ids": [0, 2]}, "embedding"),
        (RICHEST, {"mask_token_id": 24}, "mask token"),
        (RICHEST, {LAYERS: WINDOW}, "sliding_window_non_causal"),
        (RICHEST, {LAYERS: {"hidden_size": 16}}, "width 16"),
        (RICHEST, {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("dflash", {"architectures": ["DFlash3DraftModel"]}, "DFlash3DraftModel"),
        ("dflash2", {"is_causal": None}, "is_causal"),
        ("dflash2", {"draft_vocab_size": 9}, "draft_vocab_size"),
        ("dflash", {"layer_types": WINDOW["layer_types"]}, "sliding window"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 3]}}, "final norm"),
        ("eagle3", {"architectures": ["EagleLlama"]}, "EagleLlama"),
        ("eagle3", {"num_hidden_layers": 2}, "more than one layer"),
        ("eagle3", {"layer_types": ["sliding_attention"]}, "sliding window"),
        ("eagle3", {"eagle_config": {EAGLE_IDS: [0, 1, 4]}}, "4 layers"),
        # Without ids, those of the reference libraries coincide in 4 layers.
        ("eagle3", {"eagle_config": {EAGLE_IDS: None}}, "different integers"),
        (
            "eagle3",
            {"eagle_config": {EAGLE_IDS: None, "layer_ids": [0, 1, 2]}},
            "embedding",
        ),
        ("eagle3_speculators", {"speculators_model_type": "peagle"}, "peagle"),
        ("eagle3_speculators", {EAGLE_IDS: [0, 2, 3]}, "embedding"),
    ],
    ids=str,
)
def test_unsupported_drafters_are_refused(tmp_path, name, changes, message):
    folder = changed_copy(tmp_path / "drafter", name, changes)
    read = load_eagle if name.startswith("eagle3") else load
    with pytest.raises(UserError, match=message) as refusal:
        read(folder, name)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (RICHEST, {"layers.0.self_attn.sinks": np.zeros(4, "f")}, "sinks"),
        (RICHEST, {"fc.weight": np.zeros((8, 24), "f")}, "fc.weight"),
        (RICHEST, {"d2t": np.arange(9, 0, -1)}, "distinct tokens"),
        (RICHEST, {"t2d": np.arange(24) < 9, "d2t": np.full(9, 3)}, "different tokens"),
        (RICHEST, {"t2d": None, "d2t": np.arange(9)}, "seems to hold ids of tokens"),
        (RICHEST, {"norm.weight": np.full(8, np.nan, "f")}, "is not finite"),
        (RICHEST, {"embed_tokens.weight": np.ones((24, 8), "f")}, "embeddings"),
        ("eagle3", {"midlayer.hidden_norm.weight": None}, "hidden_norm"),
        ("eagle3", {"fc.weight": np.full((8, 24), np.nan, "f")}, "is not finite"),
        ("eagle3", {"d2t": np.full(9, 30)}, "d2t"),
        ("eagle3", {"t2d": np.array(True)}, "different tokens"),
    ],
    ids=str,
)
def test_damaged_tensors_are_refused(tmp_path, name, changes, message):
    folder = with_tensors(tmp_path / "drafter", name, changes)
    read = load_eagle if name.startswith("eagle3") else load
    with pytest.raises(UserError, match=message):
        read(folder, name)
