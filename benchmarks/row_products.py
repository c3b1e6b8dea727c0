"""Matrix products with few rows on a CPU: our kernel against XLA.

    python -m benchmarks.row_products --model=smollm2

Times, alternately, a pass over 1 to 64 draft tokens and the products of such a pass
alone: by XLA; by our kernels for products and attention, with parameters in the layout
for decoding; by the same kernels with matrices that stay quantized; and with products
of integers (`--precision=int8`). Writes one JSON file with device, date and versions.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks import records
from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array
from bpd_jax.cpu.integer_kernel import lanes
from bpd_jax.cpu.products import times_packed
from bpd_jax.cpu.tile import tile_of_processor
from bpd_jax.decoding.loading import load_model
from bpd_jax.models.cache import KVCache
from bpd_jax.models.device_ops import on_cpu
from bpd_jax.models.model import Model
from bpd_jax.models.products import SOFTMAX, Packed, times_rows
from bpd_jax.models.quantized import QuantizedMatrix
from bpd_jax.models.transformer_config import INT8

MODEL = cli.DEFINE_path("model", "smollm2", "model whose matrices are used.")
TOKENS = flags.DEFINE_list(
    "tokens", ["1", "2", "4", "8", "16", "32", "64"], "tokens of a pass."
)
ROUNDS = flags.DEFINE_integer("rounds", 20, "timed runs of each.")
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/row_products_cpu.json", "file.")

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


def matrices_of(model: Model) -> list[Array | QuantizedMatrix]:
    """The matrices of a model in the layout for decoding."""
    trunk = model.params["trunk"]
    leaves = jax.tree.leaves(trunk, is_leaf=lambda x: isinstance(x, Packed))
    packed = [leaf.rows for leaf in leaves if isinstance(leaf, Packed)]
    return [*packed, trunk[SOFTMAX].rows]


def products_of(
    product: Callable[[Array, Any, str], Array],
) -> Callable[[list[Any], dict[int, Array]], list[Array]]:
    """All products of a pass, with inputs of matching sizes."""

    @jax.jit
    def run(matrices: list[Any], rows: dict[int, Array]) -> list[Array]:
        # Sequentially, as in a model.
        results, last = [], jnp.zeros(())
        for matrix in matrices:
            x = rows[matrix.shape[1]] + last
            results.append(product(x, matrix, "float32"))
            last = 0.0 * results[-1][0, 0]
        return results

    return run


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


def main() -> None:
    """Times both; prints and writes the results."""
    if not on_cpu() or tile_of_processor() is None:
        raise UserError("this device has no kernel for products of few rows.")
    plain = load_model(MODEL.value)
    stored = load_model(MODEL.value, stored=True)
    models = {
        "xla": plain.model,
        "kernel": plain.for_decoding().model,
        "quantized": stored.for_decoding().model,
    }
    if lanes() is not None:
        models["integers"] = stored.for_decoding(INT8).model
    cache = plain.model.empty_cache(1, 2 * _CONTEXT)
    cache = cache.replace(lengths=jnp.full((1,), _CONTEXT, jnp.int32))
    matrices = matrices_of(models["kernel"])
    packed = products_of(times_packed)
    alone = {
        "xla": (products_of(times_rows), [x.astype(jnp.float32) for x in matrices]),
        **{name: (packed, matrices_of(models[name])) for name in [*models][1:]},
    }
    table = {}
    widths = {matrix.shape[1] for matrix in matrices}
    for count in map(int, TOKENS.value):
        tokens = jnp.ones((1, count), jnp.int32)
        rows = {width: jnp.ones((count, width)) for width in widths}
        table[count] = {
            "pass": medians(
                {
                    name: functools.partial(run, model, cache, tokens)
                    for name, model in models.items()
                },
                ROUNDS.value,
            ),
            "products": medians(
                {
                    name: functools.partial(product, operands, rows)
                    for name, (product, operands) in alone.items()
                },
                ROUNDS.value,
            ),
        }
    result = {
        **records.about("row_products"),
        "context": _CONTEXT,
        "milliseconds": table,
    }
    records.write(OUTPUT.value, result)
    print("milliseconds of a pass and of its products:", *models)
    for count, row in table.items():
        cells = [f"{time:9.1f}" for times in row.values() for time in times.values()]
        print(f"{count:6}{''.join(cells)}")


if __name__ == "__main__":
    cli.run(main)
