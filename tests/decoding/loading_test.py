"""Models that do not exist, tasks, and training from a pretrained model."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.text_task import TextTask
from bpd_jax.decoding.asset_files import load_assets
from bpd_jax.decoding.initial_parameters import initial_parameters
from bpd_jax.decoding.loading import load_model
from bpd_jax.decoding.run_loading import load_task
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.training.config import OptimizerConfig, TrainConfig
from bpd_jax.training.state import bytes_per_device, state_bytes


@pytest.mark.parametrize(
    "name, message",
    [
        ("nowhere", "there is no model 'nowhere': nowhere is not a file or folder"),
        ("demo", r"runs/demo is not a file or folder \(make train-demo trains it\)"),
    ],
)
def test_missing_model_is_reported(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        load_model(name)


def test_folder_without_a_run_is_reported(tmp_path):
    with pytest.raises(UserError, match=r"neither config\.json .* nor model\.json"):
        load_model(str(tmp_path))
    # A checkpoint folder refers to its run.
    checkpoint = tmp_path / "checkpoints" / "7"
    checkpoint.mkdir(parents=True)
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(UserError, match="does not describe a model") as error:
        load_model(str(checkpoint))
    assert str(tmp_path / "model.json") in str(error.value)


def test_task_is_loaded(tmp_path):
    path = tmp_path / "task.json"
    with pytest.raises(UserError, match=r"task\.json does not exist"):
        load_task(path)
    fields = {"corpus": "text_files", "text_files": "a*.txt", "vocabulary": "bpe:300"}
    path.write_text(json.dumps(fields))
    assert load_task(path) == TextTask(**fields)
    path.write_text('{"colour": 1}')
    with pytest.raises(UserError, match=r"task\.json does not describe a task"):
        load_task(path)


def test_ngrams_of_the_tokenizer_fit_padded_models(trained, tmp_path):
    """Rows of an embedding may have no token; n-grams may count them or not."""
    loaded = load_model(str(trained / "plain"))
    tokens, rows = loaded.tokenizer.vocab_size, loaded.vocab_size
    texts = [np.arange(1, tokens, dtype=np.int32)] * 3
    for size, fits in ((rows + 7, True), (tokens, True), (tokens - 1, False)):
        counted = [np.minimum(text, size - 1) for text in texts]
        counts = count_ngrams(counted, order=2, vocab_size=size, end_of_text=0)
        folder = tmp_path / str(size)
        estimate_katz(counts).save(folder)
        if fits:
            assets = load_assets(loaded, {"ngram": str(folder)})
            assert assets.ngram.vocab_size == rows
            continue
        with pytest.raises(UserError, match=f"has {size} tokens, but the tokenizer"):
            load_assets(loaded, {"ngram": str(folder)})


MODEL = pathlib.Path(__file__).parent.parent / "formats" / "golden" / "llama"


def test_training_starts_from_shards_of_a_pretrained_model():
    # As in a gin file: use_bias is False, and head_dim d_model / num_heads.
    implied = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "head_dim"))
    loaded = load_model(str(MODEL))
    trunk = dataclasses.replace(loaded.config.trunk, **implied)
    config = TrainConfig(
        model=BlockwiseConfig(trunk, BlockHeadsConfig(3, hidden=8)),
        task=TextTask("text_files", "*.txt", str(MODEL)),
        optimizer=OptimizerConfig(1e-3),
        batch_size=8,
        length=16,
        steps=2,
    )
    for mesh_config in (MeshConfig(fsdp=8), MeshConfig(data=8)):
        params = initial_parameters(config, str(MODEL), make_mesh(mesh_config))
        assert params.keys() == {"trunk"}
        share = bytes_per_device(params) / state_bytes(params)
        assert share == 1 if mesh_config.data == 8 else 1 / 8 <= share < 1 / 6
        jax.tree.map(
            np.testing.assert_array_equal, params["trunk"], loaded.params["trunk"]
        )
