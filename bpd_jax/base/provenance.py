"""Date, device and versions, which are recorded with results."""

import contextlib
import datetime
import os
import platform
from collections.abc import Iterable
from importlib import metadata

import jax

_PACKAGES = ("jax", "flax", "numpy", "pynini", "bpd_jax")


def today() -> str:
    """The date in ISO form."""
    return datetime.date.today().isoformat()


def device() -> str:
    """A description of the machine, such as `cpu × 1, 2 cores, x86_64`."""
    kind = jax.devices()[0].device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores = cores or os.cpu_count()
    return f"{kind} × {jax.device_count()}, {cores} cores, {platform.machine()}"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results."""
    return {"python": platform.python_version(), **package_versions(_PACKAGES)}


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those of the packages that are installed."""
    installed = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
