"""Axis names and array types of the package.

B batch rows            T query length          S cache length (slots)
D model width           N query heads           K key-value heads
H head width            F feed-forward width    V vocabulary
L block heads           W lattice width (the paper's k)
P drafts (the paper's p)                        M nodes of a draft tree

Einsum strings and shapes in docstrings use these letters.
"""

from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Num, UInt

Array: TypeAlias = jax.Array
# A jax array, or a numpy array on the host.
AnyArray: TypeAlias = jax.Array | np.ndarray
PyTree: TypeAlias = Any
Params: TypeAlias = Any

__all__ = [
    "AnyArray",
    "Array",
    "Bool",
    "Float",
    "Int",
    "Num",
    "Params",
    "PyTree",
    "UInt",
]
