import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax import api
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.pretrained_checkpoint import load_trunk
from bpd_jax.formats.gguf_model import open_gguf
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.layers import STACKED
from bpd_jax.models.mesh import MeshConfig
from bpd_jax.models.products import Packed
from bpd_jax.models.quantized import expanded, kernel_rows
from bpd_jax.models.rotary import RotaryConfig, rotate

KIND = gguf.GGMLQuantizationType

GEMMA = {
    "activation": "gelu",
    "norm_place": "both",
    "embedding_scale": 24**0.5,
    "attention_scale": 0.25,
    "head_dim": 16,
    "window": 16,
}

GEMMA3 = {**GEMMA, "query_key_norm": True}
GEMMA2 = {**GEMMA, "windowed_layers": (0,), "attention_softcap": 50.0}

# Architecture, options, and the values of the file that say so, without its prefix.
CASES = {
    "llama": ("llama", {"window": 48}, {"attention.sliding_window": 48}),
    "llama, biases": (
        "llama",
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
        {},
    ),
    "qwen2": ("qwen2", {"qkv_bias": True, "tied_softmax": False}, {}),
    "qwen3": ("qwen3", {"query_key_norm": True, "head_dim": 16}, {}),
    "gpt2, untied": ("gpt2", {"tied_softmax": False}, {}),
    "gemma2": (
        "gemma2",
        {**GEMMA2, "logit_softcap": 20.0},
        {"attention.sliding_window": 16, "final_logit_softcapping": 20.0},
    ),
    "gemma2, usual window": (
        "gemma2",
        {**GEMMA2, "window": 4096, "logit_softcap": 30.0},
        {},
    ),
    "gemma3": (
        "gemma3",
        {
            **GEMMA3,
            "num_layers": 7,
            "windowed_layers": (0, 1, 2, 3, 4, 6),
            "window_rotary": RotaryConfig(10000.0),
        },
        {"attention.sliding_window": 16},
    ),
    "gemma3, pattern": (
        "gemma3",
        {**GEMMA3, "windowed_layers": (0,), "window_rotary": RotaryConfig(500.0)},
        {
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": [True, False],
            "rope.freq_base_swa": 500.0,
        },
    ),
    "smollm3": ("smollm3", {"num_layers": 4, "unrotated_layers": (3,)}, {}),
    "phi3": (
        "phi3",
        {"rotary": RotaryConfig(5000.0, 0.5), "window": 9},
        {"rope.dimension_count": 4, "attention.sliding_window": 9},
    ),
    "granite": (
        "granite",
        {"embedding_scale": 12.0, "attention_scale": 0.5, "residual_scale": 0.25},
        {
            "embedding_scale": 12.0,
            "attention.scale": 0.5,
            "residual_scale": 0.25,
            "logit_scale": 8.0,
        },
    ),
    "granite, no positions": (
        "granite",
        {"unrotated_layers": (0, 1)},
        {"logit_scale": 1.0, "rope.scaling.finetuned": False},
    ),
    "olmo2": (
        "olmo2",
        {"norm_place": "after", "query_key_norm": True, "joint_query_key_norm": True},
        {},
    ),
}


@pytest.mark.parametrize("architecture, changes, values", CASES.values(), ids=CASES)
def test_a_gguf_model_equals_the_original(
    tiny, tmp_path, architecture, changes, values
):
    model = tiny.make(architecture, **changes)
    values = {f"{architecture}.{key}": value for key, value in values.items()}
    checkpoint = open_gguf(model.write(tmp_path / "tiny.F32.gguf", values))
    assert checkpoint.config == model.config
    assert len(checkpoint.tokenizer.encode("hehe").ids) == 2
    assert (checkpoint.begin_of_text, checkpoint.end_tokens) == (None, (0,))
    # Templates may write it, although texts do not begin with it.
    assert checkpoint.begin_text == "<begin>"
    assert checkpoint.chat_template is None
    params = load_trunk(checkpoint.config, checkpoint.layout, checkpoint.tensors)
    expected = load_trunk(model.config, checkpoint.layout, model)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_the_divisor_of_logits_divides_the_last_norm(tiny, tmp_path):
    model = tiny.make("granite")
    values = {"granite.logit_scale": 8.0}
    checkpoint = open_gguf(model.write(tmp_path / "granite.gguf", values))
    origin = checkpoint.layout["final_norm", "scale"]
    scale = model.read(origin.name)
    np.testing.assert_array_equal(origin.convert(scale), scale / 8)


def test_suppressed_tokens(tiny, tmp_path):
    key, model = "tokenizer.ggml.suppress_tokens", tiny.make("llama")
    checkpoint = open_gguf(model.write(tmp_path / "suppress.gguf", {key: [1, 3]}))
    assert checkpoint.generation == {"suppress_tokens": (1, 3)}
    path = model.write(tmp_path / "beyond.gguf", {key: [10_000]})
    with pytest.raises(
        UserError, match=r"suppress_tokens in .*beyond.gguf must consist"
    ):
        open_gguf(path)


def test_longrope(tiny, tmp_path):
    """The factors of short texts, and hence no text beyond their length."""
    values = {
        "phi3.rope.scaling.original_context_length": 32,
        "phi3.rope.scaling.attn_factor": 1.5,
    }
    factors = np.array([1.0, 1.5, 2.0, 2.5], np.float32)
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    tensors = {name: factors * n for n, name in enumerate(names, start=1)}
    path = tiny.make("phi3").write(tmp_path / "phi3.gguf", values, tensors)
    config = open_gguf(path).config
    assert config.max_length == 32
    assert config.rotary.divisors == (1.0, 1.5, 2.0, 2.5)
    assert config.rotary.amplitude == 1.5


def test_interleaved_rotary_features_become_halves(tiny, tmp_path):
    """Attention scores by llama.cpp's rule on the stored tensors, and by ours."""
    model = tiny.make("llama")
    tensors = open_gguf(model.write(tmp_path / "llama.gguf")).tensors
    width, rotary = model.config.head_width, model.config.rotary
    x = np.random.default_rng(1).normal(size=(5, model.config.d_model))

    def interleaved(name):
        features = (x @ model.stored()[name].T).reshape(5, -1, width // 2, 2)
        angles = np.arange(5)[:, None, None] * rotary.frequencies(width)
        rotated = (features[..., 0] + 1j * features[..., 1]) * np.exp(1j * angles)
        return np.stack([rotated.real, rotated.imag], -1).reshape(5, -1, width)

    def rotated_halves(name):
        features = (x @ tensors.read(name).T).reshape(1, 5, -1, width)
        return rotate(jnp.asarray(features), jnp.arange(5)[None], rotary)[0]

    expected = np.einsum(
        "tnh,skh->nts",
        interleaved("blk.1.attn_q.weight"),
        interleaved("blk.1.attn_k.weight"),
    )
    actual = np.einsum(
        "tnh,skh->nts",
        rotated_halves("model.layers.1.self_attn.q_proj.weight"),
        rotated_halves("model.layers.1.self_attn.k_proj.weight"),
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "values, tensors, message",
    [
        ({"llama.block_count": 3}, {}, "no tensor blk.2"),
        ({"llama.block_count": 1}, {}, "tensor blk.1.attn_k.weight belongs to"),
        ({"llama.attention.head_count_kv": 3}, {}, r"has shape \[8, 24\]"),
        ({"llama.rope.dimension_count": 4}, {}, "not the heads' width, 8"),
        ({}, {"blk.0.ffn_gate_inp.weight": np.ones((4, 24), "f4")}, "ffn_gate_inp"),
        ({"split.count": 3}, {}, "one of 3 parts"),
    ],
)
def test_inconsistent_files_are_refused(tiny, tmp_path, values, tensors, message):
    path = tiny.make("llama").write(tmp_path / "m.gguf", values, tensors)
    with pytest.raises(UserError, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def test_unknown_architectures_are_named(tiny, tmp_path):
    path = tiny.make("llama").write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(UserError, match="architecture 'mamba'; llama, qwen2"):
        open_gguf(path)


def write_quantized(tiny, folder, architecture):
    sizes = {"d_model": 64, "d_ff": 128, "num_heads": 4, "tied_softmax": False}
    model = tiny.make(architecture, **sizes)
    kinds = {
        name: KIND.Q4_1 if "ffn" in name else KIND.Q8_0
        for name, tensor in model.stored().items()
        if tensor.ndim == 2 and "position" not in name
    }
    return model.write(folder / "tiny.gguf", kinds=kinds)


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_quantized_weights_are_shared_by_eight_devices(tiny, tmp_path, weights):
    path = write_quantized(tiny, tmp_path, "llama")
    texts = []
    for mesh, method in (
        (None, "greedy"),
        (MeshConfig(data=2, fsdp=2, model=2), "prompt_lookup:4"),
    ):
        lm = api.load(str(path), weights_dtype=weights, mesh=mesh)
        if mesh is not None:
            mlp = lm.params["trunk"][STACKED]["mlp"]
            kernels = mlp["input"]["kernel"], mlp["output"]["kernel"]
            sizes = [
                (x.size, x.addressable_shards[0].data.size)
                for x in jax.tree.leaves(kernels)
            ]
            assert all(whole == 4 * part for whole, part in sizes)
        answers = api.generate(lm, [[5, 6, 7], [9, 3]], method, max_new_tokens=12)
        texts.append([a.generation.output_ids.tolist() for a in answers])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gpt2"])
def test_stored_weights_have_the_values_of_expanded_ones(tiny, tmp_path, architecture):
    checkpoint = open_gguf(write_quantized(tiny, tmp_path, architecture))
    plain, stored = (
        load_trunk(
            checkpoint.config, checkpoint.layout, checkpoint.tensors, stored=stored
        )
        for stored in (False, True)
    )
    trunk = stored["trunk"]
    assert (trunk["embedding"].bits, trunk["softmax"].bits) == (8, 8)
    if architecture != "gpt2":
        assert trunk["mlp_0"]["input"]["kernel"].rows.bits == 4
        assert trunk["attention_0"]["output"]["kernel"].rows.bits == 8
    config = BlockwiseConfig(checkpoint.config)
    assert fingerprint(config, stored) == fingerprint(config, plain)
    leaves = jax.tree_util.tree_leaves_with_path(
        expanded(trunk), is_leaf=lambda leaf: isinstance(leaf, Packed)
    )
    wanted = dict(jax.tree_util.tree_leaves_with_path(plain["trunk"]))
    assert {path for path, _ in leaves} == set(wanted)
    for path, leaf in leaves:
        want = wanted[path]
        if isinstance(leaf, Packed):
            leaf, want = leaf.rows, kernel_rows(path[-2].key, want)
        np.testing.assert_array_equal(leaf, want)
