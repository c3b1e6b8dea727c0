"""The command `bpd_jax.tune` on a small Hugging Face model with random heads."""

import pathlib
import shutil

import numpy as np

from bpd_jax.base import provenance
from bpd_jax.decoding.asset_files import find_tuning, load_assets
from bpd_jax.decoding.choice import tuned_choice
from bpd_jax.decoding.loading import load_model
from bpd_jax.models.blockwise_config import BlockHeadsConfig
from tests.commands import succeed
from tests.decoding.random_models import save_random_heads

ROOT = pathlib.Path(__file__).parent.parent
HEADS = BlockHeadsConfig(num_heads=3, hidden=8)


FACTS = {"accuracies": [[0.5], [0.25]]}


def test_accuracies_belong_to_the_measured_heads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "tests" / "formats" / "golden" / "llama", "tiny")
    without_heads = load_model("tiny")
    for seed, folder in enumerate(("runs/tiny/heads", "other")):
        save_random_heads(folder, without_heads, HEADS, seed=seed, facts=FACTS)
    pathlib.Path("prompts.txt").write_text("w5 w6 w7\nw8 w9\nw10\nw11\n")
    command = (
        "--model=tiny --prompts_file=prompts.txt --methods=bpd "
        "--lattice_width=4 --max_new_tokens=24"
    )
    succeed("bpd_jax.tune", *command.split(), folder=tmp_path)
    loaded, with_other_heads = load_model("tiny"), load_model("tiny", "other")
    path, facts = find_tuning(loaded)
    assert path == "runs/tiny/drafting.json"
    assert facts["format"] == 1
    accuracies = facts["accuracies"]
    assert np.array(accuracies).shape == (2, 10)
    assert load_assets(loaded).accuracies == tuple(map(tuple, accuracies))
    assert tuned_choice(path, facts, provenance.device(), 1) is not None
    # The tuning applies neither to other heads nor to the model without heads.
    assert find_tuning(with_other_heads) is None
    assert load_assets(with_other_heads).accuracies == ((0.5,), (0.25,))
    assert find_tuning(without_heads) is None
