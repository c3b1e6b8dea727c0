import json

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
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
BASE = "0123456789abcdef"


def save(folder, config=CONFIGS[0]):
    params = init_refiner(config, jax.random.key(0))
    save_refiner(folder, config, params, FACTS, BASE)
    return params


def change_header(folder, change):
    header = folder / "refiner.json"
    fields = json.loads(header.read_text())
    change(fields)
    header.write_text(json.dumps(fields))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_loaded_equals_saved(tmp_path, config):
    params = save(tmp_path / "refiner", config)
    loaded = load_refiner(tmp_path / "refiner")
    assert (loaded.kind, loaded.config, loaded.facts) == (config.kind, config, FACTS)
    assert loaded.base == BASE
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    # Files of the first version have no base.
    change_header(tmp_path / "refiner", lambda fields: fields.pop("base"))
    assert load_refiner(tmp_path / "refiner").base is None


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda fields: fields["config"].update(rank=6),
            r"embedding: its shape is \[31, 5\], not \[31, 6\]",
        ),
        (lambda fields: fields.update(kind="eagle"), "eagle"),
        (lambda fields: fields["config"].pop("d_model"), "d_model"),
    ],
)
def test_inconsistent_headers_are_reported(tmp_path, change, message):
    folder = tmp_path / "refiner"
    save(folder)
    change_header(folder, change)
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
