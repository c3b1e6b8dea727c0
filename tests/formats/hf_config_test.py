import json
import pathlib

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.formats.hf_config import text_model, transformer_config
from bpd_jax.formats.json_files import Fields
from bpd_jax.models.rotary import RotaryConfig

GOLDEN = pathlib.Path(__file__).parent / "golden"


def read(fields):
    return transformer_config(Fields(fields, "config.json"))


GPT2_XL = {
    "model_type": "gpt2",
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "n_positions": 1024,
    "vocab_size": 50257,
}


@pytest.mark.parametrize(
    "name", ["llama_linear", "llama3", "llama_yarn", "qwen3_yarn", "qwen2"]
)
def test_configs_of_older_versions_are_equivalent(name):
    """Before version 5, `rope_theta` was outside `rope_scaling`, which had a `type`."""
    fields = json.loads((GOLDEN / name / "config.json").read_text())
    scaling = dict(fields["rope_parameters"])
    older = {**fields, "rope_parameters": None, "rope_theta": scaling.pop("rope_theta")}
    scaling["type"] = scaling.pop("rope_type")
    older["rope_scaling"] = None if scaling["type"] == "default" else scaling
    assert read(older) == read(fields)


BASE = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}


def test_missing_fields_have_the_defaults_of_transformers():
    config = read({k: v for k, v in BASE.items() if k != "num_key_value_heads"})
    assert config.kv_heads == 4
    assert config.norm_epsilon == 1e-6
    assert config.rotary.base == 10000
    assert not config.tied_softmax
    assert not config.qkv_bias
    assert read({**BASE, "model_type": "qwen3"}).head_width == 128
    assert read({**BASE, "num_key_value_heads": None}) == config
    gpt2 = read(GPT2_XL)
    assert gpt2.d_ff == 6400
    assert gpt2.tied_softmax
    assert gpt2.activation == "gelu"


def test_defaults_of_gemma():
    """Files of Gemma 3 with images omit most fields of the text model."""
    gemma3 = {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    }
    config = transformer_config(text_model(Fields(gemma3, "config.json")))
    assert (config.num_heads, config.kv_heads, config.head_width) == (8, 4, 256)
    assert (config.vocab_size, config.max_length) == (262208, 131072)
    assert config.rotary_of(5) == RotaryConfig(1e6, scaling="linear", factor=8.0)
    assert config.rotary_of(6) == RotaryConfig(1e4)
    assert [config.window_of(layer) for layer in (4, 5, 6)] == [1024, None, 1024]
    gemma2 = read({**BASE, "model_type": "gemma2", "attn_logit_softcapping": None})
    assert (gemma2.attention_softcap, gemma2.logit_softcap) == (None, 30.0)
    with pytest.raises(UserError, match="the model embeds texts"):
        read({**BASE, "model_type": "gemma2", "use_bidirectional_attention": True})


@pytest.mark.parametrize(
    "kind, fields, window, layers",
    [
        ("llama", {"sliding_window": 8}, None, None),
        ("mistral", {"sliding_window": 8}, 8, None),
        ("mistral", {"max_position_embeddings": 9000}, 4096, None),
        (
            "qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            8,
            (1,),
        ),
    ],
)
def test_sliding_windows(kind, fields, window, layers):
    config = read({**BASE, "model_type": kind, **fields})
    assert (config.window, config.windowed_layers) == (window, layers)
    assert config.max_length == fields.get("max_position_embeddings", 64)


@pytest.mark.parametrize(
    "kind, factor, original, length",
    [("dynamic", 4.0, 32, 32), ("yarn", 4.0, 64, 256), ("yarn", None, 16, 64)],
)
def test_lengths_with_rope_scaling(kind, factor, original, length):
    scaling = {"type": kind, "factor": factor}
    scaling["original_max_position_embeddings"] = original
    config = read({**BASE, "rope_scaling": scaling})
    assert config.max_length == length
    assert kind != "yarn" or config.rotary.factor == 4


def test_first_name_of_longrope():
    """Phi-3 was published with positions of type `su`."""
    fields = json.loads((GOLDEN / "phi3_longrope" / "config.json").read_text())
    name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    scaling = {k: v for k, v in fields[name].items() if k != "rope_type"}
    older = read({**fields, name: None, "rope_scaling": {**scaling, "type": "su"}})
    assert older.rotary.scaling == "longrope"
    assert older == read(fields)


@pytest.mark.parametrize("name", json.loads((GOLDEN / "rotary.json").read_text()))
def test_frequencies_equal_those_of_transformers(name):
    expected = json.loads((GOLDEN / "rotary.json").read_text())[name]
    sizes = {"hidden_size": 256, "max_position_embeddings": 131072}
    scaling = {"rope_parameters": expected["rope_parameters"]}
    rotary = read({**BASE, **sizes, **scaling}).rotary
    np.testing.assert_allclose(
        rotary.frequencies(64), expected["frequencies"], rtol=2e-6
    )
    assert rotary.amplitude == pytest.approx(expected["attention_factor"], rel=1e-9)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mamba"}, "'mamba', which is not supported: choose one"),
        ({"hidden_size": None}, "has no field hidden_size"),
        ({"hidden_act": "tanh"}, "the activation 'tanh', which is not supported"),
        ({"rope_scaling": {"type": "other"}}, "of type 'other'"),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, "between layers"),
        ({"max_position_embeddings": 0}, "max_position_embeddings .* must be above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor, which models of"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised model \(gptq"),
        ({**GPT2_XL, "scale_attn_by_inverse_layer_idx": True}, "_by_inverse_layer"),
    ],
)
def test_unsupported_files_are_refused(change, message):
    with pytest.raises(UserError, match=message) as error:
        read({**BASE, **change})
    assert "\n" not in str(error.value)
