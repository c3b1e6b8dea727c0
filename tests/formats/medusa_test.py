"""Import of Medusa heads in the formats of other engines.

The engines are not run. Their logits are computed from the definition: logits of
head i = softmax_i · x, after x ← x + SiLU(W x + b) per layer.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bpd_jax.base.errors import UserError
from bpd_jax.formats.medusa_import import import_heads
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import parameter_shapes
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import random_params

D, V = 12, 21
TRUNK = TransformerConfig(
    V, 1, D, 16, num_heads=2, max_length=16, tied_softmax=False, norm="rms"
)
# Not in order, and without the first and the last token.
VOCABULARY = np.array([7, 3, 19, 11, 2], np.int64)
FASTER_DECODING, VLLM = "medusa_lm_head.safetensors", "model.safetensors"


@pytest.fixture(scope="module")
def base():
    return random_params(parameter_shapes(BlockwiseConfig(TRUNK)), 0.3, 0)


def published(folder, heads=5, layers=1, softmax=True, width=D, vocab=V, **settings):
    """Heads as FasterDecoding's training writes them, in float16.

    `settings` are further fields of config.json; with `softmax=False` the heads use the
    softmax of the model (their version 2).
    """
    random = np.random.default_rng(6)
    tensors = {}
    for i in range(heads):
        for j in range(layers):
            weight = random.normal(0, 0.3, (width, width))
            tensors[f"{i}.{j}.linear.weight"] = weight
            tensors[f"{i}.{j}.linear.bias"] = random.normal(size=width)
        if softmax:
            tensors[f"{i}.{layers}.weight"] = random.normal(size=(vocab, width))
    tensors = {name: value.astype(np.float16) for name, value in tensors.items()}
    folder.mkdir()
    save_file(tensors, folder / FASTER_DECODING)
    fields = {"medusa_num_heads": 2, "medusa_num_layers": layers, **settings}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder, tensors


def of_vllm(folder, heads=3, layers=1, vocabulary=None, **settings):
    """Heads in the layout of vLLM, with a softmax each or `original_lm_head`.

    Only the rows of `vocabulary` are stored, if there is one.
    """
    random = np.random.default_rng(7)
    rows = V if vocabulary is None else len(vocabulary)
    one = settings.get("original_lm_head", False)
    tensors = {
        f"lm_heads.{i}.weight": random.normal(size=(rows, D))
        for i in range(1 if one else heads)
    }
    for i, j in np.ndindex(heads, layers):
        tensors[f"blocks.{i}.layers.{j}.weight"] = random.normal(0, 0.3, (D, D))
        tensors[f"blocks.{i}.layers.{j}.bias"] = random.normal(size=D)
    tensors = {name: value.astype(np.float16) for name, value in tensors.items()}
    if vocabulary is not None:
        tensors["token_map"] = vocabulary
    folder.mkdir()
    save_file(tensors, folder / VLLM)
    fields = {"vocab_size": V, "truncated_vocab_size": rows, **settings}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder, tensors


def engine_logits(tensors, layer, softmaxes, hidden, vocabulary):
    """Logits `[heads, V]` of heads whose layers have these names."""
    logits = np.full((len(softmaxes), V), -np.inf)
    for i, softmax in enumerate(softmaxes):
        state, j = hidden, 0
        while (name := layer.format(i, j) + ".weight") in tensors:
            bias = tensors[layer.format(i, j) + ".bias"].astype(np.float32)
            inner = tensors[name].astype(np.float32) @ state + bias
            state, j = state + inner / (1 + np.exp(-inner)), j + 1
        logits[i, vocabulary] = softmax.astype(np.float32) @ state
    return logits


@pytest.mark.parametrize(
    "make, settings, expected",
    [
        # Fewer heads in config.json, as in the first published heads, than in the file.
        (published, {}, BlockHeadsConfig(6, kind="medusa", own_softmax=True)),
        (
            published,
            {"heads": 2, "layers": 2, "softmax": False, "version": "2"},
            BlockHeadsConfig(3, kind="medusa", layers=2),
        ),
        (of_vllm, {}, BlockHeadsConfig(4, kind="medusa", own_softmax=True)),
        (
            of_vllm,
            {"layers": 2, "original_lm_head": True},
            BlockHeadsConfig(4, kind="medusa", layers=2),
        ),
        (
            of_vllm,
            {"vocabulary": VOCABULARY},
            BlockHeadsConfig(4, kind="medusa", own_softmax=True, draft_vocabulary=5),
        ),
        (
            of_vllm,
            {"vocabulary": VOCABULARY, "original_lm_head": True},
            BlockHeadsConfig(4, kind="medusa", draft_vocabulary=5),
        ),
    ],
)
def test_imported_heads_have_the_same_logits(base, tmp_path, make, settings, expected):
    """Head i of the file, from 0, is our head i + 2, which has index i + 1."""
    folder, tensors = make(tmp_path / "m", **settings)
    config, params = import_heads(folder, TRUNK)
    assert config == expected
    layer, name = ("{}.{}.linear", "{{}}.{}.weight")
    if make is of_vllm:
        layer, name = ("blocks.{}.layers.{}", "lm_heads.{{}}.weight")
    own, ids = name.format(config.layers), settings.get("vocabulary", np.arange(V))
    shared = np.asarray(base["trunk"]["softmax"])[ids]
    softmaxes = [
        tensors[own.format(i)] if config.own_softmax else shared
        for i in range(config.num_heads - 1)
    ]
    hidden = np.random.default_rng(3).normal(size=D).astype(np.float32)
    logits = engine_logits(tensors, layer, softmaxes, hidden, ids)
    if config.draft_vocabulary:
        np.testing.assert_array_equal(params["vocabulary"], ids)
    if config.draft_vocabulary and not config.own_softmax:
        params["softmax"] = shared  # As `attach_heads` adds it.
    model = Model(BlockwiseConfig(TRUNK, config), {**base, "heads": params})
    found = np.asarray(model.head_logits(jnp.asarray(hidden)))[1:]
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)


def test_a_complete_model_with_heads(tmp_path):
    folder, tensors = published(tmp_path / "m", heads=2)
    (folder / "medusa_lm_head.safetensors").unlink()
    names = sorted(tensors)
    # In two files, among the tensors of the model.
    for number, part in enumerate((names[:3], names[3:]), 1):
        shard = {f"medusa_head.{name}": tensors[name] for name in part}
        shard["lm_head.weight"] = zeros(V, D)
        save_file(shard, folder / f"model-0000{number}-of-00002.safetensors")
    _, params = import_heads(folder, TRUNK)
    np.testing.assert_array_equal(params["bias"][1, 0], tensors["1.0.linear.bias"])


def test_variants_of_vllm(tmp_path):
    """Heads without biases, and a token map that selects rows of full softmaxes."""
    folder, _ = of_vllm(tmp_path / "m")
    path = folder / VLLM
    tensors = {k: v for k, v in load_file(path).items() if not k.endswith(".bias")}
    save_file({**tensors, "token_map": VOCABULARY}, path)
    # Without a truncated vocabulary vLLM does not look at the map.
    imported, params = import_heads(folder, TRUNK)
    assert imported == BlockHeadsConfig(4, kind="medusa", own_softmax=True)
    assert not params["bias"].any()
    fields = {"vocab_size": V, "truncated_vocab_size": len(VOCABULARY)}
    (folder / "config.json").write_text(json.dumps(fields))
    imported, params = import_heads(folder, TRUNK)
    assert imported.draft_vocabulary == len(VOCABULARY)
    assert params["vocabulary"].dtype == np.int32
    np.testing.assert_array_equal(params["vocabulary"], VOCABULARY)
    rows = tensors["lm_heads.2.weight"][VOCABULARY]
    np.testing.assert_array_equal(params["softmax"][2], rows)


def assert_refused(folder, match):
    with pytest.raises(UserError, match=match) as error:
        import_heads(folder, TRUNK)
    assert "\n" not in str(error.value)


def zeros(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    "name, tensor, match",
    [
        ("2.0.linear.bias", None, "incomplete: 5 heads.*2.0.linear.bias"),
        ("4.1.weight", None, "incomplete: 5 heads.*4.1.weight"),
        # Of models of another width and another vocabulary.
        ("0.0.linear.weight", zeros(16, 16), r"0\.0\.linear\.weight .*\[16, 16\]"),
        ("0.1.weight", zeros(V + 1, D), r"0\.1\.weight .* \[22, 12\] and not"),
        ("3.0.linear.weight", zeros(D, D, dtype=np.int8), "stored as I8"),
        ("3.0.linear.bias", zeros(D) + np.nan, "/m: the parameter bias is not finite"),
    ],
)
def test_incomplete_and_other_heads_are_refused(tmp_path, name, tensor, match):
    folder, tensors = published(tmp_path / "m")
    changed = {**tensors, name: tensor}
    present = {name: value for name, value in changed.items() if value is not None}
    save_file(present, folder / "medusa_lm_head.safetensors")
    assert_refused(folder, match)


def test_pickled_files_are_not_opened(tmp_path):
    folder, _ = published(tmp_path / "m")
    (folder / "medusa_lm_head.safetensors").unlink()
    assert_refused(folder, "contains no Medusa heads")
    (folder / "medusa_lm_head.pt").write_bytes(b"not even looked at")
    assert_refused(folder, "not read; convert .*torch.load")
    assert_refused(tmp_path / "none", "none is not a folder")
