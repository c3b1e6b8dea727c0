"""Training that begins from a pretrained model, on eight virtual devices."""

import dataclasses
import pathlib

import pytest

from bpd_jax.data.text_task import TextTask
from bpd_jax.decoding.initial_parameters import initial_parameters
from bpd_jax.decoding.loading import open_checkpoint
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.partitioning import MeshConfig
from bpd_jax.training.config import OptimizerConfig, TrainConfig
from bpd_jax.training.state import bytes_per_device, state_bytes
from bpd_jax.training.trainer import train

MODEL = pathlib.Path(__file__).parent.parent / "pretrained" / "golden" / "llama"


def test_a_mesh_gets_its_shards_and_the_loss_of_whole_copies(tmp_path):
    for number in range(12):
        words = " ".join(f"w{number * k % 30}" for k in range(40))
        (tmp_path / f"{number}.txt").write_text(words)
    # As in a gin file: use_bias is False, and head_dim d_model / num_heads.
    implied = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "head_dim"))
    trunk = dataclasses.replace(open_checkpoint(MODEL).config, **implied)
    shares, metrics = [], []
    for mesh_config in (MeshConfig(fsdp=8), MeshConfig(data=8)):
        config = TrainConfig(
            model=BlockwiseConfig(trunk, BlockHeadsConfig(3, hidden=8)),
            task=TextTask(
                "text_files",
                str(tmp_path / "*.txt"),
                str(MODEL),
                validation_fraction=0.25,
            ),
            optimizer=OptimizerConfig(1e-3),
            batch_size=8,
            length=16,
            steps=2,
            mesh=mesh_config,
        )

        def load(mesh, config=config):
            params = initial_parameters(config, str(MODEL), mesh)
            shares.append(bytes_per_device(params) / state_bytes(params))
            return params

        folder = tmp_path / f"fsdp_{mesh_config.fsdp}"
        metrics.append(train(config, folder, load_start=load))
    assert 1 / 8 <= shares[0] < 1 / 6
    assert shares[1] == 1
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)
