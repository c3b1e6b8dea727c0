"""The loop over the layers of a trunk, in training and in decoding on every device.

Its body is traced and compiled once instead of once per layer. Where the arrays of the
layers lie decides how the body gets those of its layer:

- stacked, `[layer, …]`: in training with `ComputeConfig.scan_layers`, and in decoding
  on accelerators. The loop slices them where they are read; a kernel of a GPU gets the
  whole stack and the number of the layer (`InStack`): XLA would copy the layer for it;
- apart, but kernels of a CPU read them, which get the arrays of all layers and the
  number of one (`DeviceOps.for_one_loop`);
- apart: the layers run in turn, each with code of its own.

Layers may differ in what is static, such as their window. Then a body is a period of
different layers, and a trunk without a period has several loops.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Params, PyTree
from bpd_jax.models import device_ops
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.products import Packed

# Runs a layer: the number of the first layer of its kind, its parameters, x, its cache,
# and its part of the earlier draft tokens.
Run = Callable[..., tuple[Array, KeyValues]]


def run_layers(
    run: Run,
    kinds: Sequence[Hashable],
    layers: Params | Sequence[Any],
    x: Float[Array, "B T D"],
    cache: KVCache | None,
    earlier: KeyValues | None,
    read: tuple[int, ...] = (),
) -> tuple[Float[Array, "B T D"], KeyValues, list[Array]]:
    """Runs all layers.

    Args:
      kinds: of each layer what is static and not the same in all layers.
      layers: the parameters of each, or stacked ones.
      cache: stacked if they are.
      earlier: arrays `[layer, …]`.
      read: numbers of layers whose outputs are wanted.

    Returns:
      The output of the last layer, new keys and values `[layer, …]`, and the outputs of
      `read`, `[B, T, D]` each.
    """
    stack: Params | None = None
    if isinstance(layers, Mapping):
        stack = layers
    elif len(set(kinds)) == 1:
        looped = device_ops.current().for_one_loop(layers, x, cache)
        stack, cache = looped or (None, cache)
    whole = (0, len(kinds), 1)
    carry, results = (x, [x] * len(read)), []
    for begin, period, turns in [whole] if stack is None else stretches(kinds):
        # ---- What the loop itself slices: XLA does so in place, gradients too ----
        sliced: PyTree = None
        if stack is not None and period * turns == len(kinds):
            arrays = jax.tree.map(_unless_packed, stack, is_leaf=_is_packed), earlier
            sliced = jax.tree.map(
                lambda a, n=period: a.reshape(-1, n, *a.shape[1:]), arrays
            )

        def step(
            carry: Any, at: Any, begin: int = begin, period: int = period
        ) -> tuple[Any, KeyValues]:
            (x, outputs), (turn, own) = carry, at
            pairs = []
            for place in range(period):
                number = begin + turn * period + place
                params, drafts = _of_layer(layers, stack, earlier, own, number, place)
                of_cache = None if cache is None else cache.of_layer(number)
                first = kinds.index(kinds[begin + place])
                x, new = run(first, params, x, of_cache, drafts)
                pairs.append(new)
                outputs = [
                    _selected(number == layer, x, output)
                    if (layer - begin) % period == place
                    else output
                    for layer, output in zip(read, outputs, strict=True)
                ]
            return (x, outputs), jax.tree.map(lambda *each: jnp.stack(each), *pairs)

        if turns == 1:
            own = jax.tree.map(lambda array: array[0], sliced)
            carry, new = step(carry, (0, own))
        else:
            carry, new = jax.lax.scan(step, carry, (jnp.arange(turns), sliced))
            new = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), new)
        results.append(new)
    x, outputs = carry
    if len(results) > 1:
        results = [jax.tree.map(lambda *each: jnp.concatenate(each), *results)]
    return x, results[0], outputs


def stretches(kinds: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """Splits layers into loops: the first layer, the layers of a turn, the turns.

    From each first layer on, the loop is the one over most layers, of these the one of
    the shortest period.

    >>> stretches("aaaa"), stretches("abab")
    ([(0, 1, 4)], [(0, 2, 2)])
    >>> stretches("aabaabaa"), stretches("aaabb"), stretches("ab")
    ([(0, 3, 2), (6, 1, 2)], [(0, 1, 3), (3, 1, 2)], [(0, 1, 1), (1, 1, 1)])
    """
    found, begin = [], 0
    while begin < len(kinds):
        rest, best = kinds[begin:], (1, 1)
        for period in range(1, len(rest) // 2 + 1):
            turns = 1
            while rest[turns * period :][:period] == rest[:period]:
                turns += 1
            if turns > 1 and turns * period > best[0] * best[1]:
                best = period, turns
        found.append((begin, *best))
        begin += best[0] * best[1]
    return found


def _of_layer(
    layers: Any, stack: Params | None, earlier: Any, own: Any, number: Any, place: int
) -> tuple[Any, Any]:
    """The parameters of a layer, and its part of the earlier draft tokens."""
    if stack is None:
        return layers[number], jax.tree.map(lambda array: array[number], earlier)

    def index(array: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(array, number, keepdims=False)

    if own is None:
        rest = jax.tree.map(_unless_packed, stack, is_leaf=_is_packed)
        rest, drafts = jax.tree.map(index, (rest, earlier))
    else:
        rest, drafts = jax.tree.map(lambda array: array[place], own)

    def chosen(leaf: Any, one: Array | None) -> Any:
        return leaf.of_layer(number) if _is_packed(leaf) else one

    return jax.tree.map(chosen, stack, rest, is_leaf=_is_packed), drafts


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, Packed)


def _unless_packed(leaf: Any) -> Array | None:
    return None if _is_packed(leaf) else leaf


def _selected(here: bool | Array, x: Array, output: Array) -> Array:
    if isinstance(here, bool):
        return x if here else output
    return jnp.where(here, x, output)
