"""Joint training of a 124M blockwise model, for the time that is left.

Trunk and six heads are trained together from scratch on the packed rows in the folder
`corpus`, which travels with the bundle (`benchmarks.bundle`), with as many steps as fit
into the time. Held-out rows then give the tokens per call of its own heads.
"""

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator_parts.jobs import TINY, Job, JobSettings, Row
from benchmarks.training_step import TimedStep, speed_of
from bpd_jax.base import configuration
from bpd_jax.base.errors import UserError
from bpd_jax.data.rows import PackedRows, RowIterator, open_rows
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation.efficiency import block_efficiency
from bpd_jax.models.layers import unstack_layers
from bpd_jax.models.mesh import make_mesh
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import count_parameters
from bpd_jax.storage.paths import as_path
from bpd_jax.training.config import TrainConfig

CORPUS = as_path("corpus")
# Rows of a device in a step.
ROWS = 64
# Share of the time that is left for training; the rest compiles and decodes.
_SHARE = 0.7

_TINY = (
    *TINY,
    "TransformerConfig.max_length = 512",
    "BlockHeadsConfig.num_heads = 3",
)


def jobs(settings: JobSettings) -> Iterator[Job]:
    """One job."""
    yield "blockwise_124m", lambda: _train(settings)


def _train(settings: JobSettings) -> Row:
    begin = time.monotonic()
    if not CORPUS.is_dir():
        raise UserError(
            f"there is no folder {CORPUS} here: make gpu-bundle writes one into the "
            "first bundle."
        )
    rows = open_rows(CORPUS / "train")
    batch = jax.device_count() * (1 if settings.tiny else ROWS)
    steps = 2 if settings.tiny else 100
    config = _config(settings, rows, batch, steps)
    mesh = make_mesh(config.mesh)
    step = TimedStep(config, mesh)
    if not settings.tiny:
        # Their learning rate does not matter: the run begins afterwards, anew.
        step.place()
        step.block(10)
        seconds = step.block(10)
        step.remove()
        left = settings.seconds - (time.monotonic() - begin)
        steps = max(int(_SHARE * left / seconds), steps)
        # The program of a step has the learning rates of all.
        config = _config(settings, rows, batch, steps)
        step = TimedStep(config, mesh)
    step.place()
    batches = RowIterator(rows, batch, seed=0)
    size = 1 if settings.tiny else max(steps // 20, 1)
    log, blocks = [], []
    for done in range(size, steps + 1, size):
        blocks.append(step.block(size, batches))
        log.append({"step": done, **step.metrics()})
    return {
        "parameters": count_parameters(config.model)["total"],
        "batch": [batch, rows.length],
        "steps": steps,
        "epochs": steps * batch / len(rows),
        "corpus_tokens": rows.num_tokens,
        **speed_of(config, blocks),
        "log": log,
        **_decoded(settings, config, step.params),
    }


def _config(
    settings: JobSettings, rows: PackedRows, batch: int, steps: int
) -> TrainConfig:
    bindings = [
        f"BATCH_SIZE = {batch}",
        f"LENGTH = {rows.length}",
        f"STEPS = {steps}",
        "LEARNING_RATE = 6e-4",
        f"WARMUP_STEPS = {max(steps // 20, 1)}",
        "ComputeConfig.accumulate = 1",
        f"MeshConfig.data = {jax.device_count()}",
        f"TransformerConfig.vocab_size = {rows.vocab_size}",
        f"TransformerConfig.dtype = '{settings.dtype}'",
        *(_TINY if settings.tiny else ()),
    ]
    parsed: Any = configuration.parse(
        [
            "gin_configs/models/blockwise_124m.gin",
            "gin_configs/runs/train.gin",
            "gin_configs/tasks/stdlib_gpt3.gin",
            "gin_configs/meshes/one_device.gin",
        ],
        bindings,
        TrainConfig,
    )
    config: TrainConfig = parsed.value
    return config


def _decoded(settings: JobSettings, config: TrainConfig, params: Any) -> Row:
    """Tokens per call of the trained heads after held-out beginnings of rows."""
    held_out = open_rows(CORPUS / "validation")
    count, length = (2, 16) if settings.tiny else (32, 128)
    prompts = [np.asarray(row[:length], np.int32) for row in held_out.tokens[:count]]
    options = DecodeOptions(max_new_tokens=length, batch_size=len(prompts))
    params = dict(params)
    if config.compute.scan_layers:
        params["trunk"] = jax.jit(unstack_layers)(params["trunk"])
    params = jax.tree.map(jnp.asarray, jax.device_get(params))
    decoder = Decoder(Model(config.model, params), width=4)
    plain = decoder.decode(GREEDY, prompts, options)
    texts = decoder.decode(parse_method("bpd"), prompts, options)
    pairs = zip(texts, plain, strict=True)
    wrong = sum(not np.array_equal(a.output_ids, b.output_ids) for a, b in pairs)
    return {
        "held_out_prompts": len(prompts),
        "tokens_per_call": block_efficiency(texts),
        "texts_that_differ": wrong,
    }
