"""Reports compiled programs as tables and as JSON."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from bpd_jax.base import provenance
from bpd_jax.compilation import gpus
from bpd_jax.compilation.measured_program import Measured
from bpd_jax.compilation.topology import Slice
from bpd_jax.reporting.terminal import print_rows

_GIB = 2**30
_PACKAGES = ("jax", "jaxlib", "libtpu", *gpus.PACKAGES, "flax", "optax")


def print_figures(
    accelerators: Slice, mesh: dict[str, int], programs: Sequence[Measured]
) -> None:
    """Prints a table of all figures, with one column per program."""
    chip = accelerators.chip
    sizes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
    unit, count = "GPU" if chip.gpu else "core", len(accelerators.devices)
    total = f"HBM: total, of {_gib(chip.usable)}"
    several = accelerators.slices > 1

    def network_time(one: Measured) -> str:
        return "unknown" if chip.network is None else _ms(one.times.network)

    rows: list[tuple[str, Callable[[Measured], str]] | None] = [
        ("program", lambda x: x.program.about),
        ("compilation", lambda x: f"{x.seconds:.0f} s"),
        None,
        ("HBM: arguments", lambda x: _gib(x.memory.arguments)),
        ("HBM: outputs", lambda x: _gib(x.memory.outputs)),
        ("HBM: donated", lambda x: f"-{_gib(x.memory.donated)}"),
        ("HBM: temporaries", lambda x: _gib(x.memory.temporaries)),
        ("HBM: code", lambda x: _gib(x.memory.code)),
        (total, lambda x: _gib(x.memory.needed)),
        None,
        ("FLOPs, the compiler's count", lambda x: _tera(x.xla_flops)),
        ("FLOPs, loops counted as they run", lambda x: _tera(x.costs.flops)),
        ("FLOPs, the model's own", lambda x: _tera(x.program.model_flops / x.cores)),
        ("bytes, HBM", lambda x: f"{x.costs.hbm_bytes / 1e9:,.2f} GB"),
        ("bytes, links", lambda x: f"{x.link_bytes / 1e9:,.3f} GB"),
        *[("bytes, network", lambda x: f"{x.network_bytes / 1e9:,.3f} GB")] * several,
        ("loops counted once", lambda x: f"{x.costs.open_loops}"),
        None,
        ("minimum time, compute", lambda x: _ms(x.times.compute)),
        ("minimum time, memory", lambda x: _ms(x.times.memory)),
        ("minimum time, links", lambda x: _ms(x.times.links)),
        *[("minimum time, network", network_time)] * several,
        ("roofline", lambda x: f"{_ms(x.times.seconds)} ({x.times.bound})"),
        ("tokens per second, at the roofline", _rate),
        ("MFU, at the roofline", lambda x: f"{x.mfu:.1%}"),
    ]
    print_rows(
        ["", *(one.program.name for one in programs)],
        (row and [row[0], *map(row[1], programs)] for row in rows),
        title=f"{accelerators.name}: {count} {unit}{'s' * (count > 1)}, {sizes}",
        caption=(
            f"Per {unit}. The roofline is the minimum time that the chip's peak "
            "figures allow; it is not a measurement."
        ),
        strong=[total, "roofline"],
    )


def print_collectives(program: Measured) -> None:
    """Prints a table of the collectives, the largest first."""
    rows = [
        [
            kind,
            f"{size}",
            f"{count:,}",
            f"{sent / count / 1e6:,.2f} MB",
            f"{sent / 1e9:,.3f} GB",
        ]
        for kind, size, count, sent in summed_collectives(program)
    ]
    print_rows(
        ["kind", "group", "runs", "bytes sent", "total"],
        rows,
        title=f"{program.program.name}: collectives",
    )


def summed_collectives(program: Measured) -> list[tuple[str, int, int, float]]:
    """Kind, group size, number of runs, and total bytes sent by one core."""
    times: dict[tuple[str, int], int] = defaultdict(int)
    sent: dict[tuple[str, int], float] = defaultdict(float)
    for collective, count in program.costs.collectives.items():
        key = (collective.kind, collective.group_size)
        times[key] += count
        sent[key] += count * collective.sent
    ordered = sorted(times, key=lambda key: -sent[key])
    return [(*key, times[key], sent[key]) for key in ordered]


def as_json(
    accelerators: Slice, mesh: dict[str, int], programs: Sequence[Measured]
) -> dict[str, Any]:
    """All figures as JSON values; times in seconds, memory in bytes."""
    return {
        "topology": accelerators.name,
        "cores": len(accelerators.devices),
        "slices": accelerators.slices,
        "mesh": dict(mesh),
        "chip": dataclasses.asdict(accelerators.chip),
        "versions": provenance.package_versions(_PACKAGES),
        "programs": {one.program.name: _figures(one) for one in programs},
    }


def _figures(one: Measured) -> dict[str, Any]:
    memory = dataclasses.asdict(one.memory)
    return {
        "about": one.program.about,
        "compile_seconds": round(one.seconds, 1),
        "memory_per_core": {**memory, "needed": one.memory.needed},
        "flops_per_core": {
            "compiler": one.xla_flops,
            "with_loops": one.costs.flops,
            "model": one.program.model_flops / one.cores,
        },
        "hbm_bytes_per_core": one.costs.hbm_bytes,
        "link_bytes_per_core": one.link_bytes,
        "network_bytes_per_core": one.network_bytes,
        "collectives": [
            dict(zip(("kind", "group", "times", "bytes_sent"), row, strict=True))
            for row in summed_collectives(one)
        ],
        "kernels": dict(one.costs.kernels),
        "open_loops": one.costs.open_loops,
        "roofline": {
            **dataclasses.asdict(one.times),
            "seconds": one.times.seconds,
            "bound": one.times.bound,
        },
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.mfu,
    }


def _gib(size: float) -> str:
    return f"{size / _GIB:,.2f} GiB"


def _tera(flops: float | None) -> str:
    return "-" if flops is None else f"{flops / 1e12:,.4g} T"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f} ms"


def _rate(one: Measured) -> str:
    """Tokens per second; a lower bound for decoding."""
    least = "at least " if one.program.name == "decode" else ""
    return f"{least}{one.tokens_per_second:,.0f}"
