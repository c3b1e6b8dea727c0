"""Whether the devices are CPUs."""

import jax
from jax.sharding import Mesh

# The platform of absent devices that this process compiles for.
_compiled_for: list[str] = []


def on_cpu(mesh: Mesh | None = None) -> bool:
    """Whether the devices of the mesh are CPUs; without one, those that jax uses."""
    if mesh is None:
        return (_compiled_for or [jax.default_backend()])[-1] == "cpu"
    return mesh.devices.flat[0].platform == "cpu"


def compile_for(platform: str) -> None:
    """From now on, all programs of this process are compiled for other devices."""
    _compiled_for.append(platform)
