import lzma
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.tokenizer import read_tokenizer_file
from bpd_jax.models.config_files import load_config, save_config
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.exported_params import load_run_parameters, write_exported
from bpd_jax.training.state import abstract_state, init_state, make_optimizer
from tests.training.runs import with_trunk

OPTIMIZER = make_optimizer(OptimizerConfig(1e-2), 10)


@pytest.fixture(scope="module")
def run(model, one_device, tmp_path_factory):
    """A run folder with checkpoints 3 and 7, and the parameters of the latter."""
    folder = tmp_path_factory.mktemp("slim") / "run"
    abstract = abstract_state(model, OPTIMIZER, one_device)
    with Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
        for step in (3, 7):
            state = init_state(model, OPTIMIZER, abstract, step)
            checkpoints.save(step, state, {})
    save_config(model, folder / "model.json")
    (folder / "task.json").write_text("{}")
    (folder / "tokenizer.json").write_text("[]")
    return folder, state.params


@pytest.fixture
def slim(run, tmp_path):
    write_exported(run[0], tmp_path / "slim")
    return tmp_path / "slim"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loaded_parameters_are_rounded_to_the_dtype(run, model, tmp_path, dtype):
    folder, params = run
    size = write_exported(folder, tmp_path / "slim", dtype)
    loaded = load_run_parameters(tmp_path / "slim", model)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for loaded_leaf, saved_leaf in zip(
        jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True
    ):
        assert loaded_leaf.dtype == saved_leaf.dtype == jnp.float32
        rounded = saved_leaf.astype(dtype).astype(jnp.float32)
        np.testing.assert_array_equal(loaded_leaf, rounded)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert size < 4000 + count * jnp.dtype(dtype).itemsize
    assert sorted(path.name for path in (tmp_path / "slim").iterdir()) == [
        "model.json",
        "parameters.safetensors",
        "slim.json",
        "task.json",
        "tokenizer.json",
    ]
    for name in ("model.json", "task.json", "tokenizer.json"):
        assert (tmp_path / "slim" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("dtype, error", [("bfloat16", 2**-8), ("compact", 0.2)])
def test_a_packed_export_is_read_like_another(run, model, tmp_path, dtype, error):
    folder, params = run
    size = write_exported(folder, tmp_path / "slim", dtype, packed=True)
    names = {path.name for path in (tmp_path / "slim").iterdir()}
    assert "tokenizer.json.xz" in names
    assert "tokenizer.json" not in names
    _, data = read_tokenizer_file(tmp_path / "slim")
    assert data == (folder / "tokenizer.json").read_bytes()
    loaded = load_run_parameters(tmp_path / "slim", model)

    def check(a, b):
        miss = jnp.sqrt(jnp.square(a - b).mean())
        assert miss <= error * jnp.sqrt(jnp.square(b).mean())

    jax.tree.map(check, loaded, params)
    assert size < 2 * sum(leaf.size for leaf in jax.tree.leaves(params)) + 8000
    write_exported(tmp_path / "slim", tmp_path / "plain")
    assert read_tokenizer_file(tmp_path / "plain")[1] == data


@pytest.mark.parametrize("content", [b"", b"{}", lzma.compress(b"{}")[:-4]])
def test_a_damaged_packed_tokenizer_is_reported(tmp_path, content):
    (tmp_path / "tokenizer.json.xz").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json\.xz is not a"):
        read_tokenizer_file(tmp_path)


def test_a_model_is_exported_in_another_precision(run, model, tmp_path):
    folder, params = run
    write_exported(folder, tmp_path / "slim", "float32", "bfloat16")
    exported = load_config(tmp_path / "slim" / "model.json")
    assert exported == with_trunk(model, dtype="bfloat16") != model
    loaded = load_run_parameters(tmp_path / "slim", exported)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_exported_folder_can_be_exported_again_and_replaced(slim, model, tmp_path):
    write_exported(slim, tmp_path / "again")
    content = (slim / "parameters.safetensors").read_bytes()
    assert (tmp_path / "again" / "parameters.safetensors").read_bytes() == content
    write_exported(slim, slim)
    assert (slim / "parameters.safetensors").read_bytes() == content


def test_checkpoints_take_precedence_over_exported_parameters(run, slim, model):
    folder, params = run
    (slim / "checkpoints").mkdir()  # Training has not saved anything yet.
    exported = load_run_parameters(slim, model)["trunk"]["embedding"]
    np.testing.assert_allclose(exported, params["trunk"]["embedding"], rtol=1e-2)
    shutil.copytree(folder / "checkpoints", slim / "checkpoints", dirs_exist_ok=True)
    for step, is_latest in ((None, True), (7, True), (3, False)):
        loaded = load_run_parameters(slim, model, step)["trunk"]["embedding"]
        equal = np.array_equal(loaded, params["trunk"]["embedding"])
        assert equal == is_latest


def test_damaged_files_are_reported(slim, model, make_model):
    path = slim / "parameters.safetensors"
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-5] ^= 1
    for data in (b"", content[:-1], bytes(flipped)):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"cannot read .*safetensors .*again"):
            load_run_parameters(slim, model)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"heads/bias_in: .*\[2, 8\], not \[3, 8\]"):
        load_run_parameters(slim, make_model(heads=4))
    with pytest.raises(UserError, match=r"'heads/bias_in' is unknown"):
        load_run_parameters(slim, make_model(heads=None))
    path.unlink()
    with pytest.raises(UserError, match=r"cannot read .*No such file"):
        load_run_parameters(slim, model)


def test_incomplete_runs_are_not_exported(run, tmp_path, model):
    folder, _ = run
    with pytest.raises(UserError, match="not part of exported parameters"):
        write_exported(folder, folder)
    for message, names in (
        (r"model\.json does not exist", ["model.json"]),
        (r"task\.json does not exist", ["task.json", "tokenizer.json"]),
        ("holds no checkpoint", []),
    ):
        with pytest.raises(UserError, match=message):
            write_exported(tmp_path, tmp_path / "slim")
        for name in names:
            shutil.copy(folder / name, tmp_path)
    assert not (tmp_path / "slim").exists()
