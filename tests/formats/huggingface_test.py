"""Folders of transformers: tiny models of every family, and their logits."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.loaded_model import Chat
from bpd_jax.decoding.pretrained_checkpoint import load_trunk
from bpd_jax.formats.huggingface import open_folder
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.model import Model

GOLDEN = pathlib.Path(__file__).parent / "golden"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def expected(name):
    with np.load(GOLDEN / name / "expected.npz") as arrays:
        return arrays["tokens"], arrays["logits"]


def assert_logits_of_transformers(folder, name):
    checkpoint = open_folder(folder)
    model = Model(BlockwiseConfig(checkpoint.config), parameters(folder))
    tokens, expected_logits = expected(name)

    @jax.jit
    def logits(model, tokens):
        positions = jnp.arange(tokens.shape[1])[None]
        mask = causal_mask(jnp.ones_like(tokens))
        hidden, *_ = model.forward(tokens, positions, mask)
        return model.next_token_logits(hidden)[0]

    actual = logits(model, tokens[None])
    np.testing.assert_allclose(actual, expected_logits, atol=1e-4)
    return checkpoint


@pytest.fixture
def folder(tmp_path):
    def copy(name="llama"):
        shutil.copytree(GOLDEN / name, tmp_path / name)
        return tmp_path / name

    return copy


def edit(path, **changes):
    fields = json.loads(path.read_text()) if path.exists() else {}
    fields = {**fields, **changes}
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))


def assert_refused(path, match):
    with pytest.raises(UserError, match=match) as error:
        open_folder(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name):
    """Texts of models with scaled rotary positions exceed the length before scaling.

    But with longrope, whose frequencies change there, texts end there.
    """
    checkpoint = assert_logits_of_transformers(GOLDEN / name, name)
    tokens, _ = expected(name)
    rotary = checkpoint.config.rotary
    original = rotary and rotary.scaling != "longrope" and rotary.original_length
    assert (original or 0) < len(tokens) <= checkpoint.config.max_length


def test_a_checkpoint_in_several_files(folder):
    path = folder("llama_untied")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, path / file)
        weight_map.update(dict.fromkeys(names[number::3], file))
    edit(path / "model.safetensors.index.json", metadata={}, weight_map=weight_map)
    assert_logits_of_transformers(path, "llama_untied")
    # Another file has a tensor of the same name: the index decides.
    last = path / "model-00003-of-00003.safetensors"
    save_file({**load_file(last), names[0]: 0 * tensors[names[0]]}, last)
    assert_logits_of_transformers(path, "llama_untied")
    save_file(load_file(path / weight_map[names[1]]), last)
    assert_refused(path, f"model-00003.* has no tensor {names[2]}, which")
    (path / "model-00002-of-00003.safetensors").unlink()
    assert_refused(path, "incomplete: model-00002-of-00003.safetensors, which")


@pytest.mark.parametrize(
    "name, prefix", [("gpt2", "transformer."), ("llama", "model.")]
)
def test_names_without_a_prefix(folder, name, prefix):
    path = folder(name)
    tensors = load_file(path / "model.safetensors")
    renamed = {key.removeprefix(prefix): v for key, v in tensors.items()}
    if name == "gpt2":
        # The first published files also contain the causal masks.
        renamed["h.0.attn.bias"] = np.tril(np.ones((40, 40), bool))
    save_file(renamed, path / "model.safetensors")
    assert_logits_of_transformers(path, name)


def test_end_tokens_of_tokenizer_and_generation_config(folder):
    path = folder()
    edit(path / "generation_config.json", eos_token_id=[5, 1, 7])
    assert open_folder(path).end_tokens == (1, 5, 7)
    named = {"content": "w7", "special": True}
    edit(path / "tokenizer_config.json", eos_token=named)
    assert open_folder(path).end_tokens == (7, 5, 1)
    # An older file may name it; otherwise the configuration does.
    edit(path / "tokenizer_config.json", eos_token=None)
    edit(path / "special_tokens_map.json", eos_token="w9")
    (path / "generation_config.json").unlink()
    assert open_folder(path).end_tokens == (9, 1)
    (path / "special_tokens_map.json").unlink()
    assert open_folder(path).end_tokens == (1,)
    edit(path / "config.json", eos_token_id=None)
    assert_refused(path, "has no end-of-text token")


def test_beginning_of_text(folder):
    """As in transformers 5, the post-processor decides, and not `add_bos_token`."""
    path = folder()
    edit(path / "tokenizer_config.json", add_bos_token=False)
    assert open_folder(path).begin_of_text == 0
    edit(path / "tokenizer.json", post_processor=None)
    edit(path / "tokenizer_config.json", add_bos_token=True)
    assert open_folder(path).begin_of_text is None
    # Templates may still write it.
    assert open_folder(path).begin_text == "<s>"
    edit(path / "tokenizer_config.json", bos_token=None)
    assert open_folder(path).begin_of_text is None
    assert open_folder(path).begin_text == ""


def test_chat_templates(folder):
    path = folder()
    edit(path / "tokenizer_config.json", chat_template="one")
    assert open_folder(path).chat_template == "one"
    named = [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]
    edit(path / "tokenizer_config.json", chat_template=named)
    assert open_folder(path).chat_template == "b"
    edit(path / "tokenizer_config.json", chat_template=named[:1])
    assert open_folder(path).chat_template == "a"
    (path / "chat_template.jinja").write_text("file\n")
    assert open_folder(path).chat_template == "file\n"
    (path / "chat_template.jinja").unlink()
    edit(path / "tokenizer_config.json", chat_template=7)
    assert_refused(path, "chat_template in .* must be a string")


def test_templates_for_tools_and_of_other_files(folder, capsys):
    path = folder()
    edit(path / "tokenizer_config.json", chat_template=None)
    edit(path / "chat_template.json", chat_template="older")
    assert open_folder(path).chat_template == "older"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    checkpoint = open_folder(path)
    assert checkpoint.chat_template == "older"
    chat = Chat.of(checkpoint)
    assert chat.render([]) == "older"
    assert chat.with_variables({"tools": [{"a": 1}]}).render([]) == "[{'a': 1}]"
    named = [{"name": "rag", "template": "a"}, {"name": "x", "template": "b"}]
    edit(path / "tokenizer_config.json", chat_template=named)
    assert open_folder(path).chat_template == "a"
    assert (
        "the chat templates rag, x, tool_use and no default" in capsys.readouterr().err
    )


def test_templates_may_write_all_special_tokens(folder):
    path = folder()
    template = "{{ pad_token }}{{ sep_token }}{{ image_token }}{{ eos_token }}"
    template += "{{ additional_special_tokens[0] }}{{ mask_token is defined }}"
    edit(path / "special_tokens_map.json", sep_token="<sep>", pad_token="<old>")
    edit(
        path / "tokenizer_config.json",
        chat_template=template,
        pad_token={"content": "<pad>"},
        extra_special_tokens={"image_token": "<image>"},
        additional_special_tokens=["<more>"],
        add_bos_token=True,
    )
    chat = Chat.of(open_folder(path))
    assert chat.render([]) == "<pad><sep><image></s><more>False"


def test_added_tokens_of_other_files(folder):
    """Those that tokenizer.json lacks get the ids after its last one."""
    path = folder()
    size = open_folder(path).tokenizer.get_vocab_size()
    flags = {"lstrip": False, "rstrip": True, "normalized": False, "special": True}
    entry = {"content": "<|im_start|>", **flags}
    edit(path / "tokenizer_config.json", added_tokens_decoder={str(size): entry})
    tokenizer = open_folder(path).tokenizer
    ids = tokenizer.encode("w5<|im_start|>  w7", add_special_tokens=False).ids
    assert ids == [5, size, 7]
    assert tokenizer.decode([5, size, 7]) == "w5 w7"
    # The file that older folders have; the names of special tokens decide.
    edit(path / "tokenizer_config.json", added_tokens_decoder=None, pad_token="<pad>")
    edit(path / "added_tokens.json", **{"<pad>": size, "<word>": size + 1})
    tokenizer = open_folder(path).tokenizer
    assert tokenizer.token_to_id("<word>") == size + 1
    special = tokenizer.get_added_tokens_decoder()
    assert special[size].special
    assert not special[size + 1].special
    edit(path / "added_tokens.json", **{"<word>": size + 9})
    assert_refused(
        path, f"the added token '<word>' the id {size + 9}, but .* {size + 1}"
    )
    edit(path / "tokenizer_config.json", added_tokens_decoder={"x": entry})
    assert_refused(path, "must have ids with objects that have a content")


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    "name, message",
    [
        (f"{LAYER}self_attn.q_proj.bias", "q_proj.bias, without which"),
        (f"{LAYER}mlp.down_proj.bias", "mlp.down_proj.bias"),
        (f"{LAYER}self_attn.q_norm.weight", "q_norm.weight"),
        ("model.layers.2.input_layernorm.weight", "layers.2.input_layernorm"),
        (f"{LAYER}self_attn.q_proj.lora_A.weight", "merge its adapters"),
        ("score.weight", "score.weight"),
        (f"{LAYER}self_attn.rotary_emb.inv_freq", None),
        ("medusa_head.0.0.linear.weight", None),
    ],
)
def test_tensors_that_the_configuration_leaves_out_are_refused(folder, name, message):
    path = folder()
    rewrite(path, lambda tensors: {**tensors, name: np.ones(4, np.float32)})
    if message is None:
        open_folder(path)
    else:
        assert_refused(path, f"config.json leaves out the tensor .*{message}")


def test_only_the_text_part_of_a_model_with_images_is_checked(folder):
    path = folder()

    def change(tensors):
        renamed = {
            name.replace("model.", "model.language_model."): value
            for name, value in tensors.items()
        }
        return {**renamed, "model.vision_tower.weight": np.ones(3, np.float32)}

    rewrite(path, change)
    open_folder(path)


def test_missing_files_are_named(folder):
    path = folder()
    assert_refused(path / "nowhere", r"cannot read .*nowhere/config\.json")
    (path / "tokenizer.json").rename(path / "tokenizer.model")
    assert_refused(path, "has no tokenizer.json, and older files .tokenizer.model")
    (path / "model.safetensors").unlink()
    assert_refused(
        path, "has neither model.safetensors nor model.safetensors.index.json"
    )


def test_inconsistent_sizes_are_refused(folder):
    path = folder()
    edit(path / "config.json", intermediate_size=25)
    assert_refused(
        path, r"mlp\.\w+\.weight has shape \[\d+, \d+\], but the configuration"
    )
    edit(path / "config.json", intermediate_size=24, tie_word_embeddings=False)
    assert_refused(path, r"has no tensor lm_head\.weight")
    edit(path / "config.json", num_hidden_layers=10**12)
    assert_refused(path, "must be an integer from 1 to 1000")
    edit(path / "config.json", num_hidden_layers=2, tie_word_embeddings=True)
    edit(path / "generation_config.json", eos_token_id=[1, 40])
    assert_refused(
        path, "has token 40 as a begin or end token, but the model has only 40"
    )


def test_padding_of_a_tokenizer_is_ignored(folder):
    """Padding to a length of 2 billion would exhaust the memory."""
    path = folder()
    padding = {"strategy": {"Fixed": 2_000_000_000}, "direction": "Right"}
    padding |= {"pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    edit(path / "tokenizer.json", padding={**padding, "pad_token": "x"})
    assert len(open_folder(path).tokenizer.encode("").ids) <= 1


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    save_file(change(tensors), path / "model.safetensors")


def tied(folder):
    path = folder()
    edit(path / "config.json", tie_word_embeddings=True)
    rewrite(path, lambda ts: {k: t for k, t in ts.items() if k != "lm_head.weight"})
    return path


def parameters(path):
    checkpoint = open_folder(path)
    return load_trunk(checkpoint.config, checkpoint.layout, checkpoint.tensors)


EMBEDDING = "model.embed_tokens.weight"


def test_tied_models_may_store_either_name(folder, capsys):
    path = tied(folder)
    expected = parameters(path)
    for change in (
        lambda ts: {**ts, "lm_head.weight": ts[EMBEDDING]},
        lambda ts: {k: t for k, t in ts.items() if k != EMBEDDING},
    ):
        rewrite(path, change)
        jax.tree.map(np.testing.assert_array_equal, parameters(path), expected)
    assert "warning" not in capsys.readouterr().err
    edit(path / "config.json", tie_word_embeddings=False)
    assert_refused(path, "no tensor model.embed_tokens.weight")


def test_two_different_matrices_of_a_tied_model_are_both_used(folder, capsys):
    path = tied(folder)
    rewrite(path, lambda ts: {**ts, "lm_head.weight": 2 * ts[EMBEDDING]})
    params = parameters(path)["trunk"]
    np.testing.assert_array_equal(params["softmax"], 2 * params["embedding"])
    assert "lm_head.weight differ: both are used" in capsys.readouterr().err
