"""Programs compiled for eight virtual CPU devices instead of a TPU slice."""

from dataclasses import replace

import jax
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.compilation.compiler import count_collectives
from bpd_jax.compilation.decode_programs import (
    DecodeShapes,
    decode_programs,
    ngram_table,
)
from bpd_jax.compilation.programs import frozen_programs, train_program
from bpd_jax.data.text_task import TextTask
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.parameters import abstract_parameters
from bpd_jax.models.transformer_config import ComputeConfig, TransformerConfig
from bpd_jax.training.config import OptimizerConfig, TrainConfig
from bpd_jax.training.heads.heads_config import HeadsTrainConfig

MODEL = BlockwiseConfig(
    TransformerConfig(272, 2, 32, 64, num_heads=4, max_length=64),
    BlockHeadsConfig(num_heads=3, hidden=48),
)
SHAPES = DecodeShapes(
    batch_size=4,
    prompt_tokens=16,
    max_new_tokens=8,
    method="ngram_device:4",
    lattice_width=4,
    num_ngrams=1000,
    ngram_order=3,
)


def config(**changes):
    settings = {
        "model": MODEL,
        "task": TextTask("text_files", "nowhere/*.txt", "bpe:272"),
        "optimizer": OptimizerConfig(learning_rate=1e-3),
        "batch_size": 16,
        "length": 32,
        "steps": 10,
        "compute": ComputeConfig(loss_chunk=16, scan_layers=True),
    }
    return TrainConfig(**{**settings, **changes})


def test_train_step_has_the_flops_and_memory_of_its_model():
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    # Without loops over layers and chunks, whose bodies XLA counts once.
    program = train_program(config(compute=ComputeConfig()), mesh)
    compiled = program.lower().compile()
    counted = compiled.cost_analysis()["flops"]
    assert counted == pytest.approx(program.model_flops / 8, rel=0.2)
    # The gradients are summed over rows, and parameters gathered.
    assert count_collectives(compiled.as_text())["all-reduce"] > 0
    # The state is donated: parameters and two moments, float32.
    memory = compiled.memory_analysis()
    parameters = jax.tree.leaves(abstract_parameters(MODEL, mesh))
    state = 3 * 4 * sum(x.size for x in parameters)
    assert memory.alias_size_in_bytes == pytest.approx(state / 4, rel=0.1)
    assert program.reads == pytest.approx(memory.alias_size_in_bytes, rel=0.01)


def test_decode_step_has_the_ngrams_as_arguments():
    mesh = make_mesh(MeshConfig(data=4, model=2))
    _, program = decode_programs(MODEL, SHAPES, mesh)
    table = ngram_table(MODEL, SHAPES, mesh)
    assert [len(array) for array in table.log_probs] == [274, 363, 363]
    compiled = program.lower().compile()
    arguments = compiled.memory_analysis().argument_size_in_bytes
    assert arguments > sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(table))
    # `model=2` halves most parameters and the keys and values of the 24 slots.
    cache = 2 * 2 * 4 * 24 * 32 * 4
    parameters = 4 * sum(
        x.size for x in jax.tree.leaves(abstract_parameters(MODEL, mesh))
    )
    assert cache / 8 < program.reads - parameters / 2 < cache


def programs(layers, method):
    """Decoding with heads, feed-forward layers and vocabulary over four devices."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, model=4), jax.devices()[:4])
    config = replace(MODEL, trunk=replace(MODEL.trunk, num_layers=layers))
    rescorer = BlockwiseConfig(TransformerConfig(272, 1, 16, 32, 2, max_length=64))
    return decode_programs(config, replace(SHAPES, method=method), mesh, rescorer)


@pytest.mark.parametrize(
    "method", ["greedy", "prompt_lookup:4", "neural:4", "medusa_neural:8"]
)
def test_programs_of_other_methods_are_traced(method):
    for program in programs(1, method):
        assert program.lower().as_text()


def test_layers_are_one_loop_with_two_reductions():
    """The body of a loop is in the program once, for any number of layers."""
    for one, three in zip(programs(1, "bpd"), programs(3, "bpd"), strict=True):
        few, more = (
            count_collectives(program.lower().compile().as_text())
            for program in (one, three)
        )
        assert more == few
        # Two of a layer and one of the softmax, for each size of pass.
        assert few["all-reduce"] in (3, 6)


def test_methods_that_draft_on_the_host_are_refused():
    with pytest.raises(UserError, match="ngram_viterbi:4 drafts on the host"):
        programs(1, "ngram_viterbi:4")


@pytest.mark.parametrize(
    "mesh, change, message",
    [
        (MeshConfig(data=8), {}, "--batch_size = 4 is not a multiple"),
        (
            MeshConfig(model=8),
            {"prompt_tokens": 512},
            "--prompt_tokens=512 and --max_new_tokens=8 are more than",
        ),
        (
            MeshConfig(model=8),
            {"num_ngrams": 100},
            "--num_ngrams=100 and --ngram_order=3: .* the 274 unigrams",
        ),
    ],
)
def test_incompatible_settings_are_refused(mesh, change, message):
    with pytest.raises(UserError, match=message):
        decode_programs(MODEL, replace(SHAPES, **change), make_mesh(mesh))


_DRAFTER = BlockDrafterConfig(
    (0, 1), 5, num_layers=2, draft_vocabulary=128, reads_last_token=True
)


@pytest.mark.parametrize(
    ("heads", "settings"),
    [
        (replace(_DRAFTER, guess_at_anchor=False), {}),
        (BlockHeadsConfig(4, 64, draft_vocabulary=128), {"soft_targets": 0.5}),
        (BlockHeadsConfig(3, 16, reads_anchor=True, feature_layers=(0, 1)), {}),
        (BlockHeadsConfig(3, own_softmax=True, kind="medusa"), {}),
    ],
)
def test_training_on_a_frozen_model_has_its_flops(heads, settings):
    """Each of eight devices has an eighth."""
    mesh = make_mesh(MeshConfig(data=8))
    training = HeadsTrainConfig(
        model="nowhere",
        data="nowhere",
        heads=heads,
        optimizer=OptimizerConfig(learning_rate=1e-3),
        batch_size=64,
        anchors_per_row=8,
        row_tokens=32,
        forward_tokens=256,
        **settings,
    )
    for program in frozen_programs(training, MODEL, mesh):
        compiled = program.lower().compile()
        counted = compiled.cost_analysis()["flops"]
        # The compiler counts elementwise operations, too.
        assert 1 < counted / (program.model_flops / 8) < 1.3
        assert program.reads < compiled.memory_analysis().argument_size_in_bytes
    with pytest.raises(UserError, match="multiple"):
        frozen_programs(replace(training, batch_size=44), MODEL, mesh)
