"""The price of a pass over a draft on a CPU: products of few rows, and whole passes.

    python -m benchmarks.row_products --model=smollm2
    XLA_FLAGS=--xla_cpu_max_isa=AVX2 python -m benchmarks.row_products --output=FILE

Times, alternately, a pass over several tokens and the products of such a pass alone:
with expanded matrices, with matrices as they are stored, and with products of integers
(`--precision=int8`); the products also with the matrices in each kind of storage. With
`--other`, the folder of another checkout, its own benchmark of this name follows.
Writes one JSON file with device, date and versions.
"""

import functools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import records
from bpd_jax.base import cli
from bpd_jax.base.compiled import keep_compiled
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array
from bpd_jax.cpu.integer_kernel import lanes
from bpd_jax.cpu.operands import OneOf
from bpd_jax.cpu.tile import tile_of_processor
from bpd_jax.cpu.tiled_matrix import TiledMatrix, tiled, times_tiled
from bpd_jax.decoding.loading import load_model
from bpd_jax.models.cache import KVCache
from bpd_jax.models.device_ops import on_cpu
from bpd_jax.models.model import Model
from bpd_jax.models.products import Packed
from bpd_jax.models.quantized import quantize
from bpd_jax.models.transformer_config import INT8
from bpd_jax.storage import files

MODEL = cli.DEFINE_path("model", "smollm2", "model whose matrices are used.")
TOKENS = flags.DEFINE_list(
    "tokens", ["1", "2", "4", "5", "8", "16", "64"], "tokens of a pass."
)
ROUNDS = flags.DEFINE_integer("rounds", 20, "timed runs of each.")
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/row_products_cpu.json", "file.")
OTHER = cli.DEFINE_path("other", None, "folder of another checkout.")

# Tokens in the cache.
_CONTEXT = 256


@jax.jit
def run(model: Model, cache: KVCache, tokens: Array) -> Array:
    """A pass over draft tokens `[1, T]` after the tokens in the cache."""
    length = tokens.shape[1]
    positions = _CONTEXT + jnp.arange(length)[None]
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    hidden, *_ = model.forward(tokens, positions, mask, cache)
    return model.greedy_tokens(hidden)


Groups = list[tuple[TiledMatrix, ...]]


def matrices_of(model: Model) -> Groups:
    """The matrices of a model that kernels multiply with, by shape."""
    trunk = model.params["trunk"]
    leaves = jax.tree.leaves(trunk, is_leaf=lambda x: isinstance(x, Packed))
    groups: dict[tuple[int, int], list[TiledMatrix]] = {}
    for leaf in leaves:
        if isinstance(leaf, Packed):
            groups.setdefault(leaf.rows.shape, []).append(leaf.rows)
    return [tuple(group) for group in groups.values()]


def stored_otherwise(groups: Groups) -> dict[str, Groups]:
    """The matrices in each storage that kernels read."""

    def stored(kind: Callable[[np.ndarray], TiledMatrix]) -> Groups:
        return [
            tuple(kind(np.asarray(matrix.values())) for matrix in group)
            for group in groups
        ]

    result = {
        "float32": stored(tiled),
        "bfloat16": stored(lambda matrix: tiled(matrix.astype(jnp.bfloat16))),
        "8 bits": stored(lambda matrix: tiled(quantize(matrix))),
    }
    if lanes() is not None:
        result["8 bits, integers"] = stored(
            lambda matrix: tiled(quantize(matrix), rounds_operands=True)
        )
    return result


@jax.jit
def products_of(groups: Groups, rows: dict[int, Array]) -> Array:
    """All products of a pass, one after the other, with inputs of matching sizes."""
    last = jnp.zeros(())
    for group in groups:
        x = rows[group[0].shape[1]]

        def step(
            last: Array, index: Array, x: Array = x, group: Any = group
        ) -> tuple[Array, None]:
            return 0.0 * times_tiled(x + last, OneOf(group, index))[0, 0], None

        last, _ = jax.lax.scan(step, last, jnp.arange(len(group)))
    return last


def medians(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each function, timed alternately."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def of_other(folder: str) -> dict[str, Any]:
    """The milliseconds of the same benchmark in another checkout."""
    path = pathlib.Path(folder).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        output = pathlib.Path(temporary) / "result.json"
        command = [sys.executable, "-m", "benchmarks.row_products"]
        command += [f"--model={MODEL.value}", f"--tokens={','.join(TOKENS.value)}"]
        command += [f"--rounds={ROUNDS.value}", f"--output={output}"]
        environment = {**os.environ, "PYTHONPATH": str(path)}
        subprocess.run(command, check=True, cwd=path, env=environment)
        result: dict[str, Any] = files.read_json(output)["milliseconds"]
    return result


def main() -> None:
    """Times all; prints and writes the results."""
    tile = tile_of_processor()
    if not on_cpu() or tile is None:
        raise UserError("this device has no kernels of products.")
    keep_compiled()
    stored = load_model(MODEL.value, stored=True)
    models = {
        "expanded": load_model(MODEL.value).for_decoding().model,
        "stored": stored.for_decoding().model,
    }
    if lanes() is not None:
        models["integers"] = stored.for_decoding(INT8).model
    cache = stored.model.empty_cache(1, 2 * _CONTEXT)
    cache = cache.replace(lengths=jnp.full((1,), _CONTEXT, jnp.int32))
    matrices = {name: matrices_of(model) for name, model in models.items()}
    matrices |= stored_otherwise(matrices["stored"])
    table = {}
    widths = {group[0].shape[1] for group in matrices["stored"]}
    for count in map(int, TOKENS.value):
        tokens = jnp.ones((1, count), jnp.int32)
        rows = {width: jnp.ones((count, width)) for width in widths}
        passes = {
            name: functools.partial(run, model, cache, tokens)
            for name, model in models.items()
        }
        products = {
            name: functools.partial(products_of, operands, rows)
            for name, operands in matrices.items()
        }
        table[count] = {
            "pass": medians(passes, ROUNDS.value),
            "products": medians(products, ROUNDS.value),
        }
    result = {
        **records.about("row_products"),
        "numbers in a vector": tile.width,
        "context": _CONTEXT,
        "milliseconds": table,
    }
    if OTHER.value is not None:
        result["milliseconds of the other checkout"] = of_other(OTHER.value)
    records.write(OUTPUT.value, result)
    print("milliseconds, and how many times those of the first row they are")
    first = table[int(TOKENS.value[0])]
    for kind, columns in first.items():
        print(f"{kind:8}", *(f"{name:>17}" for name in columns))
        for count, row in table.items():
            cells = [
                f"{t:9.1f}  ×{t / columns[name]:5.2f}" for name, t in row[kind].items()
            ]
            print(f"{count:8}", *cells)


if __name__ == "__main__":
    cli.run(main)
