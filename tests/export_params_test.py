"""bpd_jax.export_params as a program: what it writes decodes as the run does."""

import jax
import jax.numpy as jnp

from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.decoding.asset_files import load_assets
from bpd_jax.decoding.loading import load_model
from tests.commands import call


def test_a_slim_model_is_used_as_the_run_is(trained, tmp_path):
    flags = f"--model={trained / 'run'}", f"--output={tmp_path / 'slim'}"
    done = call("bpd_jax.export_params", *flags)
    assert done.returncode == 0, done.stderr
    assert "bytes of parameters" in done.stdout
    whole, slim = (
        load_model(str(path)) for path in (trained / "run", tmp_path / "slim")
    )
    assert slim.functions == whole.functions
    assert slim.task == whole.task
    rounded = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(x.dtype), whole.params
    )
    assert jax.tree.all(jax.tree.map(jnp.array_equal, slim.params, rounded))
    assert Tokenizer.load(tmp_path / "slim").to_json() == whole.tokenizer.to_json()
    # It helps another model, too.
    given = {"rescorer": str(tmp_path / "slim")}
    assert load_assets(whole, given).rescorer.functions == whole.functions


def test_bad_flags_end_in_one_sentence(trained, tmp_path):
    for flags, message in (
        (["--output=x"], "error: --model is missing"),
        ([f"--model={tmp_path / 'no'}", f"--output={tmp_path / 'x'}"], "is this a run"),
    ):
        done = call("bpd_jax.export_params", *flags)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()
