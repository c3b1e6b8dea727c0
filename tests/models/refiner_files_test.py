import json

import jax
import numpy as np
import pytest

from bpd_jax.errors import UserError
from bpd_jax.models.refiner_files import check_fits, load_refiner, save_refiner
from bpd_jax.models.trained_refiners import (
    HydraConfig,
    MarkovConfig,
    RecurrentConfig,
    init_refiner,
)

CONFIGS = [
    MarkovConfig(31, 8, 4, rank=5),
    RecurrentConfig(31, 8, 4, rank=5, width=6),
    HydraConfig(31, 8, 4, width=10),
]
FACTS = {"command": "train", "seconds": 1.5, "held_out": {"plain_loss": [2.0, 3.0]}}


def save(folder, config=CONFIGS[0], seed=0):
    params = init_refiner(config, jax.random.key(seed))
    save_refiner(folder, config, params, FACTS)
    return params


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_loaded_equals_saved(tmp_path, config):
    params = save(tmp_path / "refiner", config)
    loaded = load_refiner(tmp_path / "refiner")
    assert (loaded.kind, loaded.config, loaded.facts) == (config.kind, config, FACTS)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def test_a_newer_refiner_replaces_the_older(tmp_path):
    save(tmp_path / "refiner", CONFIGS[2])
    params = save(tmp_path / "refiner", seed=1)
    loaded = load_refiner(tmp_path / "refiner")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    assert [path.name for path in tmp_path.iterdir()] == ["refiner"]


def test_base_is_saved_and_may_be_unknown(tmp_path):
    folder = tmp_path / "refiner"
    params = save(folder)
    assert load_refiner(folder).base is None
    save_refiner(folder, CONFIGS[0], params, FACTS, "0123456789abcdef")
    assert load_refiner(folder).base == "0123456789abcdef"
    # Files of the first version have no base.
    header = folder / "refiner.json"
    fields = json.loads(header.read_text())
    del fields["base"]
    header.write_text(json.dumps(fields))
    assert load_refiner(folder).base is None


def damage(folder, fault):
    header, arrays = folder / "refiner.json", folder / "params.npz"
    fields = json.loads(header.read_text())
    if fault == "cut":
        arrays.write_bytes(arrays.read_bytes()[:-100])
    elif fault == "flipped":
        content = bytearray(arrays.read_bytes())
        content[len(content) // 2] ^= 1
        arrays.write_bytes(content)
    elif fault == "gone":
        arrays.unlink()
    elif fault == "foreign":
        np.savez(arrays, other=np.zeros(3))
    elif fault == "resized":
        fields["config"]["rank"] = 6
    elif fault == "kind":
        fields["kind"] = "eagle"
    elif fault == "field":
        del fields["config"]["d_model"]
    header.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "fault, message",
    [
        ("cut", "params.npz"),
        ("flipped", "params.npz"),
        ("gone", "params.npz"),
        ("foreign", "'embedding' is missing"),
        ("resized", r"embedding: its shape is \[31, 5\], not \[31, 6\]"),
        ("kind", "eagle"),
        ("field", "d_model"),
    ],
)
def test_damaged_files_are_reported(tmp_path, fault, message):
    folder = tmp_path / "refiner"
    save(folder)
    damage(folder, fault)
    with pytest.raises(UserError, match=message) as error:
        load_refiner(folder)
    assert "python -m bpd_jax.train_refiner" in str(error.value)


def test_a_refiner_fits_its_own_model_only():
    config = CONFIGS[0]
    check_fits(config, vocab_size=31, d_model=8, block_size=4)
    for sizes in ((32, 8, 4), (31, 9, 4), (31, 8, 5)):
        names = ("vocab_size", "d_model", "block_size")
        with pytest.raises(UserError, match=r"31 tokens, width 8 and 4 heads.*--kind"):
            check_fits(config, **dict(zip(names, sizes, strict=True)))
