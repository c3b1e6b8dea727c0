"""Whether the devices are CPUs."""

import jax
from jax.sharding import Mesh


def on_cpu(mesh: Mesh | None = None) -> bool:
    """Whether the devices of the mesh are CPUs; without one, those that jax uses."""
    if mesh is None:
        return jax.default_backend() == "cpu"
    return mesh.devices.flat[0].platform == "cpu"
