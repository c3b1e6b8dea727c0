"""N-gram models as arrays in the memory of an accelerator.

Per order, sorted as in `bpd_jax.ngrams.trie`:

    log_probs      float32                         4 bytes per n-gram
    symbols        uint16, or int32 above 65,534   2 or 4, not for unigrams
    log_backoffs   float32                         4, not for the highest order
    first_child    int32: offsets of extensions    4, not for the highest order

This is 14 or 16 bytes per n-gram, and 6 or 8 per n-gram of the highest order. Unigrams
are indexed by their symbol. An n-gram is looked up by binary search among the
extensions of its prefix; the number of steps is that of the longest list.
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import AnyArray, Array, Bool, Float, Int
from bpd_jax.ngrams.model import NGramModel


def _symbol_type(width: int) -> Any:
    """The type of `width` different symbols."""
    return np.uint16 if width <= np.iinfo(np.uint16).max else np.int32


@flax.struct.dataclass
class DeviceTable:
    """A back-off model for jitted functions.

    Attributes:
      log_probs: per order, natural logarithms; unigrams are indexed by symbol.
      log_backoffs: per order but the highest.
      first_child: per order but the highest, `[n + 1]`.
      symbols: per order from the second on, the last symbol of each n-gram.
      steps: per order from the second on, number of steps of the binary search.
      vocab_size: V.
      end_of_text: see `NGramModel`.
    """

    log_probs: tuple[Float[AnyArray, " n"], ...]
    log_backoffs: tuple[Float[AnyArray, " n"], ...]
    first_child: tuple[Int[AnyArray, " n"], ...]
    symbols: tuple[Int[AnyArray, " n"], ...]
    steps: tuple[int, ...] = flax.struct.field(pytree_node=False)
    vocab_size: int = flax.struct.field(pytree_node=False)
    end_of_text: int | None = flax.struct.field(pytree_node=False)

    @classmethod
    def from_model(cls, model: NGramModel) -> "DeviceTable":
        """Returns the table of a model, as numpy arrays."""
        if max(model.sizes) >= 2**31 - 1:
            raise UserError(
                f"the n-gram model has {max(model.sizes):,} n-grams of one order, but "
                "a table on a device has at most 2^31: prune the model."
            )
        width, symbol_type = model.width, _symbol_type(model.width)
        unigrams = model.keys[0]
        log_probs = [np.full(width, -np.inf, np.float32)]
        log_probs[0][unigrams] = model.log_probs[0]
        log_backoffs, first_child, symbols, steps = [], [], [], []
        for order in range(1, model.order):
            # Numpy only, because hosts with accelerators may lack numba.
            parents = model.keys[order] // width
            weights = model.log_backoffs[order - 1]
            if order == 1:
                parents, weights = unigrams[parents], np.zeros(width)
                weights[unigrams] = model.log_backoffs[0]
            children = np.bincount(parents, minlength=weights.size)
            first = np.zeros(children.size + 1, np.int32)
            np.cumsum(children, out=first[1:])
            first_child.append(first)
            log_backoffs.append(weights.astype(np.float32))
            symbols.append((model.keys[order] % width).astype(symbol_type))
            log_probs.append(model.log_probs[order].astype(np.float32))
            steps.append(int(np.max(children, initial=0)).bit_length())
        return cls(
            log_probs=tuple(log_probs),
            log_backoffs=tuple(log_backoffs),
            first_child=tuple(first_child),
            symbols=tuple(symbols),
            steps=tuple(steps),
            vocab_size=model.vocab_size,
            end_of_text=model.end_of_text,
        )

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], vocab_size: int) -> "DeviceTable":
        """The shapes of a table with `sizes[n - 1]` n-grams of order n.

        The search among the continuations of a context is as long as for the whole
        vocabulary.
        """

        def arrays(sizes: Sequence[int], dtype: Any) -> Any:
            return tuple(jax.ShapeDtypeStruct((size,), dtype) for size in sizes)

        return cls(
            log_probs=arrays(sizes, np.float32),
            log_backoffs=arrays(sizes[:-1], np.float32),
            first_child=arrays([size + 1 for size in sizes[:-1]], np.int32),
            symbols=arrays(sizes[1:], _symbol_type(sizes[0])),
            steps=(vocab_size.bit_length(),) * (len(sizes) - 1),
            vocab_size=vocab_size,
            end_of_text=0,
        )

    @property
    def order(self) -> int:
        """N."""
        return len(self.log_probs)

    def has_children(self, order: int, index: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether n-grams of `order` (1, 2, ...) have extensions."""
        first = self.first_child[order - 1]
        return take(first, index) < take(first, index + 1)

    def find_child(
        self, order: int, parents: Int[Array, "..."], symbols: Int[Array, "..."]
    ) -> Int[Array, "..."]:
        """Returns the indices of the n-grams `parent + symbol`, -1 for missing ones.

        Args:
          order: order of the parents, 1 ... N-1.
          parents: indices; negative ones have no children.
          symbols: last symbols, of the same shape.
        """
        first, level = self.first_child[order - 1], self.symbols[order - 1]
        at = jnp.maximum(parents, 0)
        low, end = take(first, at), take(first, at + 1)
        # A negative parent has no children, and its search range is empty.
        end = jnp.where(parents < 0, low, end)

        def halve(_: int, window: tuple[Array, Array]) -> tuple[Array, Array]:
            low, size = window
            half = size // 2
            middle = low + half
            right = (take(level, middle) < symbols) & (size > 0)
            return (
                jnp.where(right, middle + 1, low),
                jnp.where(right, size - half - 1, half),
            )

        steps = self.steps[order - 1]
        low, _ = jax.lax.fori_loop(0, steps, halve, (low, end - low))
        exists = (low < end) & (take(level, low) == symbols)
        return jnp.where(exists, low, -1)


def take(array: AnyArray, index: Int[Array, "..."]) -> Array:
    """`array[index]`; indices must be valid."""
    return jnp.take(array, index, mode="clip")
