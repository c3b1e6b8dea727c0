"""The commands `export`, `import_heads` and `export_params`.

`outputs_test` shows that they replace no folder of others.
"""

import json
import pathlib
import shlex

import numpy as np
import pytest

from bpd_jax.decoding.asset_files import load_assets, read_drafter
from bpd_jax.decoding.loading import load_model
from bpd_jax.models.attachment_files import load_drafter
from bpd_jax.models.blockwise_config import BlockHeadsConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from tests.commands import assert_all_refused, succeed
from tests.decoding.random_models import save_random_drafter
from tests.formats.medusa_test import published

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
    """A random `drafter` of the base."""
    folder = tmp_path_factory.mktemp("drafters")
    loaded = load_model(str(BASE))
    config = BlockDrafterConfig((0, 1), block_size=4, num_layers=1, window=8)
    save_random_drafter(folder / "drafter", loaded, config, dtype="int8")
    return folder


def test_exported_block_drafter_can_be_loaded(folder, tmp_path):
    drafter = f"--drafter={folder / 'drafter'}"
    flags = ["--output=out", "--precision=float32"]
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


def test_published_drafters_are_not_replaced(folder, tmp_path):
    """They have the files of an export, but not its header."""
    flags = [f"--model={BASE}", f"--drafter={folder / 'drafter'}", "--output=out"]
    for _ in range(2):  # It replaces what it has written.
        run(tmp_path, "export", flags)
    (tmp_path / "out" / "exported.json").unlink()
    message = "out is not written to: it is not an exported block drafter"
    assert_all_refused("bpd_jax.export", [(flags, message)], tmp_path)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
    }


def test_published_medusa_heads_are_imported(tmp_path):
    trunk = load_model(str(BASE)).config.trunk
    published(tmp_path / "heads", 2, width=trunk.d_model, vocab=trunk.vocab_size)
    flags = [f"--model={BASE}", "--medusa=heads", "--output=back"]
    printed = run(tmp_path, "import_heads", flags)
    assert "2 Medusa heads with a softmax each" in printed
    assert "they predict 2 to 3 tokens ahead" in printed
    # The base model loads the imported heads.
    heads = load_model(str(BASE), str(tmp_path / "back")).config.heads
    assert heads == BlockHeadsConfig(3, kind="medusa", own_softmax=True)


def test_what_cannot_be_exported_or_imported_is_refused(tmp_path):
    flags = [f"--model={BASE}", "--output=never"]
    cases = [(flags, "no folder with a block drafter")]
    assert_all_refused("bpd_jax.export", cases, tmp_path)
    cases = [([*flags, "--medusa=nowhere"], "nowhere is not a folder")]
    assert_all_refused("bpd_jax.import_heads", cases, tmp_path)
    assert not (tmp_path / "never").exists()


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
