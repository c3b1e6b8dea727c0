"""Arrays of all layers in one, of which a loop over layers reads one at a time."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array


@flax.struct.dataclass
class InStack:
    """One of the layers of a stack, chosen while a program runs.

    What reads it slices the stack once, or is a kernel that gets all of it and the
    number of the layer: a layer that is sliced first may be copied.

    Attributes:
      stack: an array, or a `StoredMatrix` whose arrays have one more axis.
      index: int32, the layer.
      axis: the axis of the layers. Static.
    """

    stack: Any
    index: Any
    axis: int = flax.struct.field(pytree_node=False, default=0)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of a layer."""
        shape: tuple[int, ...] = self.stack.shape
        is_array = hasattr(self.stack, "ndim")
        return shape[: self.axis] + shape[self.axis + is_array :]

    @property
    def dtype(self) -> Any:
        """That of the stack, which is an array."""
        return self.stack.dtype

    def chosen(self) -> Any:
        """The layer itself, which XLA may copy."""

        def choose(array: Array) -> Array:
            index = jax.lax.dynamic_index_in_dim
            return index(array, self.index, self.axis, keepdims=False)

        return jax.tree.map(choose, self.stack)


def in_stack(array: Any, axis: int = 0) -> InStack:
    """The same for a single array or matrix, which is a stack of one."""
    if isinstance(array, InStack):
        return array
    stack = jax.tree.map(lambda x: jnp.expand_dims(x, axis), array)
    return InStack(stack, 0, axis)
