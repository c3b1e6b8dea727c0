"""The commands `bpd_jax.export` and `bpd_jax.import_heads`."""

import json
import pathlib
import re
import shlex

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.asset_files import load_assets, read_drafter
from bpd_jax.decoding.loading import SHIPPED, load_model
from bpd_jax.models.blockwise_config import BlockHeadsConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_files import load_drafter
from bpd_jax.models.heads_files import load_heads
from bpd_jax.pretrained.export_folder import vllm_command
from bpd_jax.pretrained.medusa_export import VLLM, check_exportable
from tests.commands import assert_refused, start
from tests.decoding.random_models import save_random_drafter, save_random_heads

ROOT = pathlib.Path(__file__).parent.parent
BASE = ROOT / "tests" / "pretrained" / "golden" / "llama"


def call(folder, module, *commands):
    """Exit status, output and errors of a command with each list of arguments."""
    return start(f"bpd_jax.{module}", *commands, folder=folder)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Folders of random heads of the base: `medusa`, and `plain` of another kind."""
    folder = tmp_path_factory.mktemp("heads")
    loaded = load_model(str(BASE))
    vocabulary = np.array([9, 4, 30, 5], np.int32)
    for name, config, ids in (
        ("plain", BlockHeadsConfig(3, hidden=8), None),
        ("medusa", BlockHeadsConfig(3, kind="medusa", draft_vocabulary=4), vocabulary),
    ):
        save_random_heads(folder / name, loaded, config, ids, dtype="float32")
    return folder


def test_exported_medusa_heads_are_imported_unchanged(heads, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("the only copy")
    base = [f"--model={BASE}", f"--heads={heads / 'medusa'}"]
    vllm, medusa, repeated, without_heads, other_kind, taken = call(
        tmp_path,
        "export",
        [*base, "--output=vllm", "--precision=float32", "--base=org/tiny"],
        [*base, "--output=medusa", "--format=medusa"],
        [*base, "--output=medusa", "--format=medusa"],
        [f"--model={BASE}", "--output=never"],
        [f"--model={BASE}", f"--heads={heads / 'plain'}", "--output=never"],
        [*base, "--output=taken"],
    )
    for result in (vllm, medusa, repeated):
        assert result[0] == 0, result[2]
    lines = vllm[1].splitlines()
    assert lines[0] == (
        "2 Medusa heads over 4 tokens of llama written to vllm: config.json and "
        "model.safetensors, float32."
    )
    # A shell can parse the printed command, and its settings are JSON.
    *command, settings = shlex.split(lines[1])
    assert command == ["vllm", "serve", "org/tiny", "--speculative-config"]
    expected = {"method": "medusa", "model": "vllm", "num_speculative_tokens": 2}
    assert json.loads(settings) == expected
    assert "single chain" in lines[2]
    assert "no draft vocabulary" in medusa[1]
    written = json.loads((tmp_path / "medusa" / "config.json").read_text())
    assert written["base_model_name_or_path"] == str(BASE)

    assert_refused(
        without_heads, "no block heads to export: give a folder with --heads"
    )
    assert_refused(other_kind, "train heads of kind medusa")
    assert_refused(taken, "holds thesis.txt")
    assert {path.name for path in tmp_path.iterdir()} == {"vllm", "medusa", "taken"}

    wrong_folder = tmp_path / "wrong"
    wrong_folder.mkdir()
    tensors = load_file(tmp_path / "vllm" / "model.safetensors")
    tensors["blocks.1.layers.0.weight"] = np.zeros((8, 8), np.float32)
    save_file(tensors, wrong_folder / "model.safetensors")
    (wrong_folder / "config.json").write_text(
        (tmp_path / "vllm/config.json").read_text()
    )
    name = f"--model={BASE}"
    imported, into_taken, wrong_shape, without_medusa = call(
        tmp_path,
        "import_heads",
        [name, "--medusa=vllm", "--output=back", "--precision=float32"],
        [name, "--medusa=vllm", "--output=taken"],
        [name, "--medusa=wrong", "--output=never"],
        [name, "--medusa=taken", "--output=never"],
    )
    assert imported[0] == 0, imported[2]
    assert "2 Medusa heads with the softmax of the base over 4 tokens" in imported[1]
    assert "they predict 2 to 3 tokens ahead" in imported[1]
    assert_refused(into_taken, "holds thesis.txt")
    assert_refused(wrong_shape, "blocks.1.layers.0.weight of wrong has shape [8, 8]")
    assert_refused(without_medusa, "taken contains no Medusa heads")
    assert not (tmp_path / "never").exists()
    assert (tmp_path / "taken" / "thesis.txt").read_text() == "the only copy"

    first, second = load_heads(heads / "medusa"), load_heads(tmp_path / "back")
    assert (second.config, second.base) == (first.config, first.base)
    for key, value in first.tensors.items():
        np.testing.assert_array_equal(second.tensors[key], value, strict=True)
    # The base model loads the imported heads.
    loaded = load_model(str(BASE), str(tmp_path / "back"))
    assert loaded.config.heads == first.config
    assert loaded.accuracies is None


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """A folder of a random block drafter of the base."""
    folder = tmp_path_factory.mktemp("drafter") / "drafter"
    config = BlockDrafterConfig((0, 1), block_size=4, num_layers=1, window=8)
    save_random_drafter(folder, load_model(str(BASE)), config, dtype="int8")
    return folder


def test_exported_block_drafter_can_be_loaded(drafter, tmp_path):
    base = [f"--model={BASE}", "--format=speculators"]
    exported, without_drafter, heads, layout = call(
        tmp_path,
        "export",
        [*base, f"--drafter={drafter}", "--output=out", "--precision=float32"],
        [*base, "--output=never"],
        [*base, "--heads=some", "--output=never"],
        [f"--model={BASE}", f"--drafter={drafter}", "--output=never"],
    )
    assert exported[0] == 0, exported[2]
    lines = exported[1].splitlines()
    # The tokenizer uses all ids, so the mask token is the end of text.
    assert "block drafter of llama with 1 layers (dspark) written to out" in lines[0]
    assert "embedding of token 1 is the mask embedding" in lines[0]
    *command, settings = shlex.split(lines[1])
    assert command == ["vllm", "serve", str(BASE), "--speculative-config"]
    expected = {"method": "dspark", "model": "out", "num_speculative_tokens": 3}
    assert json.loads(settings) == expected
    assert_refused(without_drafter, "no folder with a block drafter")
    assert_refused(heads, "--format=speculators is for block drafters")
    assert_refused(layout, "--format=speculators")
    assert not (tmp_path / "never").exists()

    loaded = load_model(str(BASE))
    imported = read_drafter(loaded, tmp_path / "out")
    first = load_drafter(drafter)
    assert imported.config == first.config
    for name, value in first.tensors.items():
        np.testing.assert_array_equal(imported.tensors[name], value, err_msg=name)

    attached = load_assets(loaded, {"drafter": str(tmp_path / "out")}).drafter
    assert attached.functions.config == first.config
    with pytest.raises(UserError, match="never"):
        load_assets(loaded, {"drafter": str(tmp_path / "never")})


def test_documented_command_matches_the_heads_of_the_recipe():
    """The page shows what the command prints for the Medusa heads of SmolLM2."""
    page = (ROOT / "docs" / "export.md").read_text()
    out, serve = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[:2]
    words = shlex.split(out.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "bpd_jax.export"]
    flags = dict(word.removeprefix("--").split("=") for word in words[3:])
    assert flags.keys() == {"model", "heads", "format", "base", "output"}
    assert flags["format"] == VLLM.name
    recipe = (ROOT / "experiments" / "smollm2" / "recipe.sh").read_text()
    folder = flags["heads"].removeprefix("runs/smollm2/").removesuffix("/heads")
    assert f'--workdir="$run/{folder}"' in recipe
    heads = BlockHeadsConfig(9, kind="medusa", draft_vocabulary=8192)
    check_exportable(heads, VLLM)
    printed = vllm_command(
        flags["base"], "medusa", flags["output"], heads.num_heads - 1
    )
    assert shlex.split(serve.replace("\\\n", " ")) == shlex.split(printed)
    # The default heads cannot be exported, as both pages state.
    with pytest.raises(UserError, match="kind = 'feed_forward'"):
        check_exportable(load_heads(SHIPPED / flags["model"] / "heads").config, VLLM)
