"""`bpd_jax.export_params` as a command: its output loads like the run."""

import jax
import jax.numpy as jnp

from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.decoding.asset_files import load_assets
from bpd_jax.decoding.loading import load_model
from tests.commands import assert_all_refused, call


def test_exported_model_loads_like_the_run(trained, tmp_path):
    flags = f"--model={trained / 'run'}", f"--output={tmp_path / 'slim'}"
    result = call("bpd_jax.export_params", *flags)
    assert result.returncode == 0, result.stderr
    assert "bytes of parameters" in result.stdout
    original, exported = (
        load_model(str(path)) for path in (trained / "run", tmp_path / "slim")
    )
    assert exported.config == original.config
    assert exported.task == original.task
    rounded = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(x.dtype), original.params
    )
    assert jax.tree.all(jax.tree.map(jnp.array_equal, exported.params, rounded))
    assert Tokenizer.load(tmp_path / "slim").to_json() == original.tokenizer.to_json()
    # It also serves as the rescorer of another model.
    folders = {"rescorer": str(tmp_path / "slim")}
    assert load_assets(original, folders).rescorer.config == original.config


def test_invalid_flags_are_refused(tmp_path):
    cases = [
        (["--output=x"], "error: --model is missing"),
        (["--model=no", "--output=x"], "is this a run"),
    ]
    assert_all_refused("bpd_jax.export_params", cases, tmp_path)
    assert not (tmp_path / "x").exists()
