"""An n-gram model as arrays in the memory of an accelerator.

Per order, in the order of `bpd_jax.ngrams.trie`:

    log_probs      float32                            4 bytes per n-gram
    symbols        uint16, or int32 above 65,534      2 or 4, not for unigrams
    log_backoffs   float32                            4, not for the highest order
    first_child    int32: where the extensions begin  4, not for the highest order

That is 14 or 16 bytes per n-gram, and 6 or 8 for one of the highest order. Unigrams are
indexed by their symbol. An n-gram is found by a binary search among the extensions of
its prefix, in as many steps as the longest list of extensions takes.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.typing import AnyArray, Array, Bool, Float, Int


@flax.struct.dataclass
class DeviceTable:
    """A back-off model that jitted code can read.

    Attributes:
      log_probs: per order, natural logarithms; orders from the second on as they are
        sorted, the first one indexed by symbol.
      log_backoffs: per order but the highest.
      first_child: per order but the highest, `[n + 1]`.
      symbols: per order from the second on, the last symbol of each n-gram.
      steps: per order from the second on, steps of the binary search.
      vocab_size: V.
      end_of_text: see `NGramModel`.
      shard_axis: the mesh axis over which the arrays are cut in equal parts, or None;
        with one, look-ups must run inside `jax.shard_map` over that axis.
    """

    log_probs: tuple[Float[AnyArray, " n"], ...]
    log_backoffs: tuple[Float[AnyArray, " n"], ...]
    first_child: tuple[Int[AnyArray, " n"], ...]
    symbols: tuple[Int[AnyArray, " n"], ...]
    steps: tuple[int, ...] = flax.struct.field(pytree_node=False)
    vocab_size: int = flax.struct.field(pytree_node=False)
    end_of_text: int | None = flax.struct.field(pytree_node=False)
    shard_axis: str | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def from_model(cls, model: NGramModel) -> "DeviceTable":
        """Returns the table of a model, as numpy arrays.

        Raises:
          UserError: an order has 2^31 n-grams or more.
        """
        if max(model.sizes) >= 2**31 - 1:
            raise UserError(
                f"the n-gram model has {max(model.sizes):,} n-grams of one order, more "
                "than a device table can number (2^31): prune the model."
            )
        width = model.width
        small = width <= np.iinfo(np.uint16).max
        symbol_type = np.uint16 if small else np.int32
        unigrams = model.keys[0]
        log_probs = [np.full(width, -np.inf, np.float32)]
        log_probs[0][unigrams] = model.log_probs[0]
        log_backoffs, first_child, symbols, steps = [], [], [], []
        for order in range(1, model.order):
            # Plain numpy: hosts with accelerators may lack numba.
            parents = model.keys[order] // width
            number = np.bincount(parents, minlength=model.keys[order - 1].size)
            weights = model.log_backoffs[order - 1]
            if order == 1:
                number, weights = _by_symbol(unigrams, (number, weights), width)
            first = np.zeros(number.size + 1, np.int32)
            np.cumsum(number, out=first[1:])
            first_child.append(first)
            log_backoffs.append(weights.astype(np.float32))
            symbols.append((model.keys[order] % width).astype(symbol_type))
            log_probs.append(model.log_probs[order].astype(np.float32))
            steps.append(int(number.max(initial=0)).bit_length())
        return cls(
            log_probs=tuple(log_probs),
            log_backoffs=tuple(log_backoffs),
            first_child=tuple(first_child),
            symbols=tuple(symbols),
            steps=tuple(steps),
            vocab_size=model.vocab_size,
            end_of_text=model.end_of_text,
        )

    @property
    def order(self) -> int:
        """N."""
        return len(self.log_probs)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def sharded(self, mesh: Mesh, axis: str) -> "DeviceTable":
        """Cuts every array into equal parts over a mesh axis, padded at the end."""
        parts = mesh.shape[axis]
        sharding = NamedSharding(mesh, PartitionSpec(axis))

        def cut(array: np.ndarray) -> Array:
            padded = np.pad(np.asarray(array), (0, -len(array) % parts), mode="edge")
            return jax.device_put(padded, sharding)

        return dataclasses.replace(jax.tree.map(cut, self), shard_axis=axis)

    def as_predicted(self, tokens: Int[Array, "..."]) -> Int[Array, "..."]:
        """The symbols of tokens that are predicted: `</s>` for the end of text."""
        if self.end_of_text is None:
            return tokens
        eos = trie.eos_symbol(self.vocab_size)
        return jnp.where(tokens == self.end_of_text, eos, tokens)

    def as_history(self, tokens: Int[Array, "..."]) -> Int[Array, "..."]:
        """The symbols of tokens in a history: `<s>` for the end of text."""
        if self.end_of_text is None:
            return tokens
        bos = trie.bos_symbol(self.vocab_size)
        return jnp.where(tokens == self.end_of_text, bos, tokens)

    def take(self, array: AnyArray, index: Int[Array, "..."]) -> Array:
        """`array[index]`, from whichever device holds it; indices must be valid."""
        if self.shard_axis is None:
            return jnp.take(array, index, mode="clip")
        begin = jax.lax.axis_index(self.shard_axis) * array.shape[0]
        local = index - begin
        here = (local >= 0) & (local < array.shape[0])
        values = jnp.take(array, local, mode="clip")
        if values.dtype == jnp.uint16:
            values = values.astype(jnp.int32)
        return jax.lax.psum(jnp.where(here, values, 0), self.shard_axis)

    def has_children(self, order: int, index: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether n-grams of `order` (1, 2, ...) have extensions."""
        first = self.first_child[order - 1]
        return self.take(first, index) < self.take(first, index + 1)

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
        low, end = self.take(first, at), self.take(first, at + 1)
        # A negative parent has no children, and its search range is empty.
        end = jnp.where(parents < 0, low, end)

        def halve(_: int, window: tuple[Array, Array]) -> tuple[Array, Array]:
            low, size = window
            half = size // 2
            middle = low + half
            right = (self.take(level, middle) < symbols) & (size > 0)
            return (
                jnp.where(right, middle + 1, low),
                jnp.where(right, size - half - 1, half),
            )

        steps = self.steps[order - 1]
        low, _ = jax.lax.fori_loop(0, steps, halve, (low, end - low))
        exists = (low < end) & (self.take(level, low) == symbols)
        return jnp.where(exists, low, -1)


def _by_symbol(
    unigrams: np.ndarray, arrays: tuple[np.ndarray, ...], width: int
) -> list[np.ndarray]:
    """Arrays over unigrams as arrays over all symbols, 0 for those that are not."""
    spread = []
    for array in arrays:
        wide = np.zeros(width, array.dtype)
        wide[unigrams] = array
        spread.append(wide)
    return spread
