"""Export and import of heads in the formats of other engines.

The engines are not run. Their logits are computed from the definition: logits of
head i = softmax_i · x, after x ← x + SiLU(W x + b) per layer.
"""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bpd_jax.base.errors import UserError
from bpd_jax.formats.medusa_export import export_heads
from bpd_jax.formats.medusa_import import import_heads
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.model import Model
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import random_heads, random_params

D, V = 12, 21
TRUNK = TransformerConfig(
    V, 1, D, 16, num_heads=2, max_length=16, tied_softmax=False, norm="rms"
)
# Not in order, and without the first and the last token.
VOCABULARY = np.array([7, 3, 19, 11, 2], np.int32)
CONFIGS = {
    "shared": BlockHeadsConfig(4, kind="medusa"),
    "deep": BlockHeadsConfig(3, kind="medusa", layers=2),
    "own": BlockHeadsConfig(4, kind="medusa", own_softmax=True),
    "draft": BlockHeadsConfig(3, kind="medusa", draft_vocabulary=len(VOCABULARY)),
}
FILES = {"vllm": "model.safetensors", "medusa": "medusa_lm_head.safetensors"}


@pytest.fixture(scope="module")
def base():
    return random_params(parameter_shapes(BlockwiseConfig(TRUNK)), 0.3, 0)


def with_heads(base, heads):
    model = BlockwiseConfig(TRUNK, heads)
    return model, {**base, "heads": random_heads(model, base, heads, VOCABULARY)}


@pytest.fixture
def model(base, request):
    return with_heads(base, CONFIGS[request.param])


def export(folder, model, layout, dtype="float32"):
    config, params = model
    export_heads(folder, config, params, layout=layout, base="org/base", dtype=dtype)
    return folder, json.loads((folder / "config.json").read_text())


def engine_logits(folder, layout, base, hidden):
    """Logits `[heads, V]` that an engine computes from the files alone.

    The layout `medusa` omits the softmax if it is the base model's.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / FILES[layout])
    if layout == "medusa":
        heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
        shared = np.asarray(base["trunk"]["softmax"])
        softmaxes = [tensors.get(f"{i}.{layers}.weight", shared) for i in range(heads)]
        names = "{i}.{j}.linear"
        if config.get("version") == "2":
            assert not any(f"{i}.{layers}.weight" in tensors for i in range(heads))
    else:
        heads, layers = config["num_heads"], config["num_hidden_layers"]
        own = not config["original_lm_head"]
        softmaxes = [tensors[f"lm_heads.{own * i}.weight"] for i in range(heads)]
        names = "blocks.{i}.layers.{j}"
    logits = np.full((heads, V), -np.inf)
    for i, softmax in enumerate(softmaxes):
        state = hidden
        for j in range(layers):
            name = names.format(i=i, j=j)
            inner = tensors[f"{name}.weight"] @ state + tensors[f"{name}.bias"]
            state = state + inner / (1 + np.exp(-inner))
        logits[i, tensors.get("token_map", np.arange(V))] = softmax @ state
    return logits


@pytest.mark.parametrize("model", CONFIGS, indirect=True)
@pytest.mark.parametrize("layout", FILES)
def test_exported_heads_have_the_same_logits(model, base, layout, tmp_path):
    """Head i of the export, from 0, is our head i + 2, which has index i + 1."""
    folder, _ = export(tmp_path / "out", model, layout)
    assert {path.name for path in folder.iterdir()} == {"config.json", FILES[layout]}
    hidden = np.random.default_rng(3).normal(size=D)
    exported = engine_logits(folder, layout, base, hidden)
    config, params = model
    expected = np.asarray(Model(config, params).head_logits(jnp.asarray(hidden)))
    assert len(expected) == len(exported) + 1
    if layout == "medusa" and config.heads.draft_vocabulary:
        # This layout has no draft vocabulary; logits agree within ours.
        exported, expected = exported[:, VOCABULARY], expected[:, VOCABULARY]
    np.testing.assert_allclose(exported, expected[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", ["draft"], indirect=True)
def test_config_of_vllm(model, tmp_path):
    folder, config = export(tmp_path / "out", model, "vllm", "float16")
    assert config == {
        "base_model_name_or_path": "org/base",
        "torch_dtype": "float16",
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": D,
        "vocab_size": V,
        "truncated_vocab_size": 5,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
    }
    tensors = load_file(folder / "model.safetensors")
    assert tensors["token_map"].dtype == np.int64
    assert tensors["lm_heads.0.weight"].dtype == np.float16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", CONFIGS, indirect=True)
@pytest.mark.parametrize("layout", FILES)
def test_round_trip(model, layout, dtype, tmp_path):
    folder, _ = export(tmp_path / "out", model, layout, dtype)
    config, params = import_heads(folder, TRUNK)
    expected = model[0].heads
    if layout == "medusa":
        expected = dataclasses.replace(expected, draft_vocabulary=None)
    assert config == expected
    names = {"kernel", "bias"}
    names |= {"softmax"} if expected.own_softmax else set()
    names |= {"vocabulary"} if expected.draft_vocabulary else set()
    assert set(params) == names
    for name in names - {"vocabulary"}:
        assert params[name].dtype == np.float32
        value = np.asarray(model[1]["heads"][name], jnp.dtype(dtype)).astype("f")
        np.testing.assert_array_equal(params[name], value, strict=True)
    if "vocabulary" in names:
        np.testing.assert_array_equal(params["vocabulary"], VOCABULARY, strict=True)


def published(folder, heads=5, layers=1, softmax=True, **settings):
    """A checkpoint as FasterDecoding's training writes it, in float16."""
    random = np.random.default_rng(6)
    tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = random.normal(size=(D, D))
            tensors[f"{i}.{j}.linear.bias"] = random.normal(size=D)
        if softmax:
            tensors[f"{i}.{layers}.weight"] = random.normal(size=(V, D))
    tensors = {name: value.astype(np.float16) for name, value in tensors.items()}
    folder.mkdir()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    fields = {"medusa_num_heads": 2, "medusa_num_layers": layers, **settings}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder, tensors


def test_published_heads_are_counted_in_the_file(tmp_path):
    """The config.json of the first published heads states two heads, not five."""
    folder, tensors = published(tmp_path / "m")
    config, params = import_heads(folder, TRUNK)
    assert config == BlockHeadsConfig(6, kind="medusa", own_softmax=True)
    np.testing.assert_array_equal(params["softmax"][4], tensors["4.1.weight"])


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


def test_variants_of_vllm(base, tmp_path):
    """Heads without biases, and a token map that selects rows of full softmaxes."""
    folder, config = export(tmp_path / "m", with_heads(base, CONFIGS["own"]), "vllm")
    path = folder / "model.safetensors"
    tensors = {k: v for k, v in load_file(path).items() if not k.endswith(".bias")}
    ids = VOCABULARY.astype(np.int64)
    save_file({**tensors, "token_map": ids}, path)
    # Without a truncated vocabulary vLLM does not look at the map.
    imported, params = import_heads(folder, TRUNK)
    assert imported == CONFIGS["own"]
    assert not params["bias"].any()
    config["truncated_vocab_size"] = len(ids)
    (folder / "config.json").write_text(json.dumps(config))
    imported, params = import_heads(folder, TRUNK)
    assert imported == dataclasses.replace(CONFIGS["own"], draft_vocabulary=len(ids))
    np.testing.assert_array_equal(params["vocabulary"], VOCABULARY, strict=True)
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


@pytest.mark.parametrize(
    "heads, match",
    [
        (None, "no block heads to export"),
        (BlockHeadsConfig(3, hidden=8), "kind = 'feed_forward'.*train heads of kind"),
        (BlockHeadsConfig(3, kind="medusa", first_has_ffn=True), "first_has_ffn"),
        (
            dataclasses.replace(CONFIGS["own"], draft_vocabulary=5),
            "both a draft vocabulary and a softmax",
        ),
    ],
)
def test_unsupported_heads_are_not_exported(base, tmp_path, heads, match):
    model = (BlockwiseConfig(TRUNK, heads), base)
    for layout in FILES:
        with pytest.raises(UserError, match=match):
            export(tmp_path / "out", model, layout)
    assert not list(tmp_path.iterdir())
