"""The commands `export`, `import_heads` and `export_params`.

`outputs_test` shows that they replace no folder of others.
"""

import json
import pathlib
import re
import shlex

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.asset_files import load_assets, read_drafter
from bpd_jax.decoding.loading import SHIPPED, load_model
from bpd_jax.formats.medusa_export import VLLM, check_exportable
from bpd_jax.formats.safetensors_files import vllm_command
from bpd_jax.models.attachment_files import load_drafter, load_heads
from bpd_jax.models.blockwise_config import BlockHeadsConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from tests.commands import assert_all_refused, succeed
from tests.decoding.random_models import save_random_drafter, save_random_heads

ROOT = pathlib.Path(__file__).parent.parent
BASE = ROOT / "tests" / "formats" / "golden" / "llama"


def run(folder, module, arguments):
    """The output of a command, which succeeds."""
    return succeed(f"bpd_jax.{module}", *arguments, folder=folder).stdout


def vllm_settings(printed):
    """The settings in the command for vLLM, which a shell can parse."""
    *command, settings = shlex.split(printed.splitlines()[1])
    assert command[:2] == ["vllm", "serve"]
    return command[2], json.loads(settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random `medusa` heads of the base, and a `drafter`."""
    folder = tmp_path_factory.mktemp("heads")
    loaded = load_model(str(BASE))
    vocabulary = np.array([9, 4, 30, 5], np.int32)
    heads = BlockHeadsConfig(3, kind="medusa", draft_vocabulary=4)
    save_random_heads(folder / "medusa", loaded, heads, vocabulary, dtype="float32")
    config = BlockDrafterConfig((0, 1), block_size=4, num_layers=1, window=8)
    save_random_drafter(folder / "drafter", loaded, config, dtype="int8")
    return folder


def test_exported_medusa_heads_are_imported_unchanged(folder, tmp_path):
    base = [f"--model={BASE}", f"--heads={folder / 'medusa'}"]
    exact = "--precision=float32"
    printed = run(
        tmp_path, "export", [*base, "--output=vllm", exact, "--base=org/tiny"]
    )
    expected = {"method": "medusa", "model": "vllm", "num_speculative_tokens": 2}
    assert vllm_settings(printed) == ("org/tiny", expected)
    for _ in range(2):  # It replaces what it has written.
        run(tmp_path, "export", [*base, "--output=medusa", "--format=medusa"])
    written = json.loads((tmp_path / "medusa" / "config.json").read_text())
    assert written["base_model_name_or_path"] == str(BASE)
    imported = [f"--model={BASE}", "--medusa=vllm", "--output=back", exact]
    printed = run(tmp_path, "import_heads", imported)
    assert "they predict 2 to 3 tokens ahead" in printed

    first, second = load_heads(folder / "medusa"), load_heads(tmp_path / "back")
    assert (second.config, second.base) == (first.config, first.base)
    for key, value in first.tensors.items():
        np.testing.assert_array_equal(second.tensors[key], value, strict=True)
    # The base model loads the imported heads.
    assert load_model(str(BASE), str(tmp_path / "back")).config.heads == first.config


def test_exported_block_drafter_can_be_loaded(folder, tmp_path):
    drafter = f"--drafter={folder / 'drafter'}"
    flags = ["--format=speculators", "--output=out", "--precision=float32"]
    printed = run(tmp_path, "export", [f"--model={BASE}", drafter, *flags])
    # The tokenizer uses all ids, so the mask token is the end of text.
    assert "embedding of token 1 is the mask embedding" in printed
    expected = {"method": "dspark", "model": "out", "num_speculative_tokens": 3}
    assert vllm_settings(printed) == (str(BASE), expected)
    loaded = load_model(str(BASE))
    first, imported = load_drafter(folder / "drafter"), tmp_path / "out"
    assert read_drafter(loaded, imported).config == first.config
    for name, value in first.tensors.items():
        found = read_drafter(loaded, imported).tensors[name]
        np.testing.assert_array_equal(found, value, err_msg=name)
    attached = load_assets(loaded, {"drafter": str(imported)}).drafter
    assert attached.functions.config == first.config


def test_what_cannot_be_exported_or_imported_is_refused(folder, tmp_path):
    base, output = f"--model={BASE}", "--output=never"
    speculators = [base, output, "--format=speculators"]
    cases = [
        (speculators, "no folder with a block drafter"),
        ([*speculators, "--heads=some"], "--format=speculators is for block drafters"),
        ([base, output, f"--drafter={folder / 'drafter'}"], "--format=speculators"),
    ]
    assert_all_refused("bpd_jax.export", cases, tmp_path)
    cases = [([base, output, "--medusa=nowhere"], "nowhere is not a folder")]
    assert_all_refused("bpd_jax.import_heads", cases, tmp_path)
    assert not (tmp_path / "never").exists()


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


def test_exported_parameters_load_like_the_run(trained, tmp_path):
    """`training/exported_params_test` compares the parameters."""
    flags = f"--model={trained / 'run'}", f"--output={tmp_path / 'slim'}"
    assert "bytes of parameters" in run(tmp_path, "export_params", flags)
    original, exported = (
        load_model(str(path)) for path in (trained / "run", tmp_path / "slim")
    )
    assert (exported.config, exported.task) == (original.config, original.task)
    # It also serves as the rescorer of another model.
    folders = {"rescorer": str(tmp_path / "slim")}
    assert load_assets(original, folders).rescorer.config == original.config
    cases = [
        (["--output=x"], "error: --model is missing"),
        (["--model=no", "--output=x"], "is this a run"),
    ]
    assert_all_refused("bpd_jax.export_params", cases, tmp_path)
    assert not (tmp_path / "x").exists()
