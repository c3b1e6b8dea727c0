"""How parameters and optimizer of the paper's models are sharded over a mesh."""

import json
import pathlib

import jax
import pytest

from bpd_jax.base import configuration
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.transformer_config import ComputeConfig
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.state import abstract_state, make_optimizer

GOLDEN = pathlib.Path(__file__).with_name("partition_specs.json")
MODELS = ("blockwise_1b5", "rescorer_32m", "rescorer_61m", "rescorer_94m")
OPTIMIZER = make_optimizer(OptimizerConfig(1e-3), 10)


def specs_of(name, compute):
    """Shape and PartitionSpec of every array of the train state, by its path."""
    path = f"gin_configs/models/{name}.gin"
    model = configuration.parse([path], [], BlockwiseConfig).value
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    state = abstract_state(model, OPTIMIZER, mesh, compute)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [
            list(leaf.shape),
            list(leaf.sharding.spec),
        ]
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


@pytest.mark.parametrize("name", MODELS)
def test_specs_of_the_papers_models_equal_the_golden_file(name):
    """A layout change must show as a change of partition_specs.json."""
    specs = specs_of(name, ComputeConfig(scan_layers=True))
    assert specs == json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
