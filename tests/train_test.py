"""The command `bpd_jax.train`."""

import shutil

import numpy as np
import pytest

from bpd_jax.data.generations import write_header, write_shard
from bpd_jax.decoding.loading import load_model
from bpd_jax.models.attachment_files import check_fits, load_refiner
from bpd_jax.models.config_files import load_config
from bpd_jax.training.checkpoints import load_parameters
from tests.commands import (
    assert_all_refused,
    assert_refused,
    call,
    succeed,
    succeed_all,
)

MODEL = """
include 'gin_configs/tasks/text_files.gin'
include 'gin_configs/runs/train.gin'
TextTask.validation_fraction = 0.25
BlockwiseConfig.trunk = @TransformerConfig()
BlockwiseConfig.heads = @BlockHeadsConfig()
TransformerConfig:
  num_layers = 1
  d_model = 16
  d_ff = 32
  num_heads = 2
  max_length = 32
  rotary = @RotaryConfig()
BlockHeadsConfig:
  num_heads = 3
  hidden = 8
STEPS = 2
BATCH_SIZE = 8
LENGTH = 32
LEARNING_RATE = 1e-2
WARMUP_STEPS = 2
VOCABULARY = 'bpe:270'
"""


def run(folder, *arguments):
    return succeed("bpd_jax.train", "--gin_file=run.gin", *arguments, folder=folder)


def refuse(folder, message, *arguments):
    result = call("bpd_jax.train", "--gin_file=run.gin", *arguments, folder=folder)
    assert_refused(result, message)


def write_run(folder):
    """Writes `run.gin`, and the texts to train on."""
    (folder / "run.gin").write_text(MODEL)
    (folder / "texts").mkdir()
    for number in range(12):
        lines = [f"{number} times {k} is {number * k}." for k in range(20)]
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines))


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path)
    return tmp_path


def test_dry_run_describes_the_run_and_writes_nothing(folder):
    before = sorted(folder.rglob("*"))
    result = run(folder, "--dry_run", "--gin.TEXT_FILES='texts/*.txt'", "--gin.STEPS=5")
    for expected in (
        "gin_configs/runs/train.gin\n",
        "STEPS = 2   (overridden, --gin.STEPS=5)",
        "TransformerConfig.vocab_size = @vocabulary_size()",
        "OptimizerConfig.beta2 = 0.98",
        "parameters: ",
        "trunk/embedding: float32[270, 16] P('model', 'fsdp')",
        "tokens per step: 256",
    ):
        assert expected in result.stdout
    assert sorted(folder.rglob("*")) == before


def test_dry_run_for_a_slice_reports_what_is_missing_here(folder):
    flags = ["--dry_run", "--topology=v4:4x4x4", "--gin.TEXT_FILES='none/*.txt'"]
    mesh = ["--gin.MeshConfig.fsdp=2", "--gin.BATCH_SIZE=128"]
    result = run(folder, *flags, *mesh, "--gin.TrainConfig.start='runs/none'")
    assert "missing here: text_files='none/*.txt' matches no file" in result.stdout
    assert "missing here: TrainConfig.start = 'runs/none' is not" in result.stdout
    message = "data × fsdp × model = 64 × 1 × 1, but there are 128 devices"
    refuse(folder, message, *flags, "--gin.MeshConfig.data=64")
    refuse(folder, "--topology is for --dry_run", *flags[1:])


def test_dry_run_of_heads_uses_the_mesh(trained, tmp_path):
    """Each of eight devices loads an eighth of the model, which has 0.03 MB."""
    run_folder, mesh = trained / "run", "--gin.HeadsTrainConfig.mesh=@MeshConfig()"

    def preview(model, *flags, command=succeed):
        file = "--gin_file=gin_configs/runs/heads.gin"
        names = [f"--gin.MODEL='{model}'", f"--gin.DATA='{tmp_path}'"]
        sizes = ["--gin.HIDDEN=8", "--gin.DRAFT_VOCABULARY=None"]
        more = ["--dry_run", "--topology=v5e:2x4", *flags]
        return command("bpd_jax.train", file, *names, *sizes, *more)

    refused = preview(run_folder, command=call)
    assert_refused(refused, "v5e:2x4 has 8 devices, of which the run would")
    result = preview("runs/none", mesh, "--gin.MeshConfig.fsdp=8")
    assert "missing here: HeadsTrainConfig.model = 'runs/none' is not" in result.stdout
    assert f"missing here: {tmp_path} " in result.stdout
    write_header(tmp_path, base="", vocab_size=270, facts={})
    texts = [np.arange(20) for _ in range(100)]
    write_shard(tmp_path, 0, texts, [1] * len(texts))
    result = preview(run_folder, mesh, "--gin.MeshConfig.fsdp=8")
    assert "'fsdp': 8, 'model': 1}, 0.00 MB of the model each" in result.stdout
    assert "states: 1,900 of width 16 in float16" in result.stdout


def test_a_refiner_is_trained_for_a_run(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    file, model = "--gin_file=gin_configs/runs/refiner.gin", "--gin.MODEL='run'"
    setting = "--gin.RefinerTrainConfig"
    cases = [
        ([], "MODEL has no value"),
        ([model], "--workdir is missing"),
        ([model, f"{setting}.heads='x'", "--workdir=w"], "other heads are for"),
        ([model, "--workdir=run"], "run/checkpoints belongs to a run with other"),
    ]
    cases = [([file, *words], message) for words, message in cases]
    assert_all_refused("bpd_jax.train", cases, tmp_path)
    words = [file, model, "--gin.STEPS=2", f"{setting}.rank=8"]
    workdir = "--workdir=run/refiners/markov"
    dry, done = succeed_all(
        "bpd_jax.train", [*words, "--dry_run"], [*words, workdir], folder=tmp_path
    )
    assert "Markov refiner, " in dry.stdout
    assert "model: plain" in done.stdout
    folder = tmp_path / "run" / "refiners" / "markov" / "markov"
    loaded = load_refiner(folder)
    check_fits(loaded.config, vocab_size=270, d_model=16, block_size=4)
    assert loaded.config.rank == 8
    assert len(loaded.facts["held_out"]["refined_text_accuracy"]) == 3
    assert load_model(str(tmp_path / "run")).find_asset("refiners/markov") == folder
    # The run can still be resumed.
    assert set(before) < set(tmp_path.rglob("*"))


def test_trains_and_starts_from_what_was_trained(folder):
    texts = "--gin.TEXT_FILES='texts/*.txt'"
    refuse(folder, "TEXT_FILES has no value: add --gin.TEXT_FILES", "--workdir=w")
    refuse(folder, "--workdir is missing", texts)
    result = run(folder, "--workdir=w", texts)
    assert "finished: validation loss per head" in result.stdout
    assert "Traceback" not in result.stderr
    model = load_config(folder / "w" / "model.json")
    params = load_parameters(folder / "w" / "checkpoints", model)
    assert params["trunk"]["embedding"].shape == (270, 16)
    assert "TEXT_FILES = 'texts/*.txt'" in (folder / "w" / "config.gin").read_text()

    start = [texts, "--gin.TrainConfig.start='w'", "--gin.VOCABULARY='w'"]
    # Rotary positions have no parameters, so that a model may read longer texts.
    longer = "--gin.TransformerConfig.max_length=64"
    heads = "--gin.BlockHeadsConfig.num_heads=2"
    result = run(folder, "--workdir=fewer", *start, longer, heads)
    assert "start: trunk of w, with new block heads" in result.stdout
    wide = "--workdir=wide", *start, "--gin.TransformerConfig.d_ff=16"
    refuse(folder, "TransformerConfig.d_ff is 16, but 32 in w: give the sizes", *wide)
    other = "--workdir=other", *start[:2], "--gin.VOCABULARY='bpe:271'"
    refuse(folder, "the vocabulary bpe:271 is trained on the task's text", *other)
