"""No pass over whole texts keeps an array of T × T numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.data.rows import Batch
from bpd_jax.decoding.decode_loop import run_prompts
from bpd_jax.decoding.recorded_drafter import CHUNK
from bpd_jax.decoding.recording import _record as record
from bpd_jax.evaluation.scoring import _score_targets
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import parameter_shapes
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.training.heads.frozen_states import read_texts
from bpd_jax.training.loss import BlockwiseLoss
from bpd_jax.training.refiner_sources import outputs_of_rows

T = 16384
CONFIG = BlockwiseConfig(
    TransformerConfig(
        vocab_size=8,
        d_model=8,
        num_layers=2,
        num_heads=1,
        d_ff=8,
        max_length=T,
        window=T // 2,
        windowed_layers=(1,),
    ),
    BlockHeadsConfig(num_heads=2, hidden=8),
)
PARAMS = parameter_shapes(CONFIG)
MODEL = Model(CONFIG, PARAMS)
ROWS = jax.ShapeDtypeStruct((1, T), jnp.int32)
BATCH = Batch(ROWS, ROWS, ROWS, jax.ShapeDtypeStruct((1, T), bool))


def refiner(params, batch):
    return outputs_of_rows(CONFIG, params, batch, model_targets=True)


def loss(params, batch):
    return BlockwiseLoss(CONFIG)(params, batch, (1.0, 1.0))[0]


PASSES = {
    "prefill": lambda: run_prompts.lower(MODEL, (), ROWS, None),
    "scoring": lambda: _score_targets.lower(MODEL, ROWS, np.zeros((3, 128), np.int32)),
    "recording": lambda: record.lower(
        *(MODEL, jax.ShapeDtypeStruct((T,), jnp.int32), jnp.int32(0), None),
        *(2, CHUNK, (), None),
    ),
    "frozen states": lambda: read_texts.lower(
        BlockwiseLM(CONFIG), jnp.dtype("float16"), (), PARAMS, ROWS
    ),
    "refiners": lambda: jax.jit(refiner).lower(PARAMS, BATCH),
    "training": lambda: jax.jit(jax.grad(loss)).lower(PARAMS, BATCH),
}


@pytest.mark.parametrize("name", PASSES)
def test_no_array_has_the_square_of_the_text_length(name):
    """An array of T × T would be one of booleans, or of scores of a head, at least."""
    compiled = PASSES[name]().compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * T
    sizes = [
        np.prod([int(size) for size in shape.split(",")])
        for shape in re.findall(r"\w\d+\[([\d,]+)\]", compiled.as_text())
    ]
    assert max(sizes) < T * T
