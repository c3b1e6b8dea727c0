"""Reports compiled programs as a table and as JSON."""

import dataclasses
import importlib.metadata
import importlib.util
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bpd_jax.compilation import gpus
from bpd_jax.compilation.measured_program import Measured
from bpd_jax.compilation.topology import Slice

_GIB = 2**30
_PACKAGES = ("jax", "jaxlib", "libtpu", *gpus.PACKAGES, "flax", "optax")


def table(
    accelerators: Slice, mesh: dict[str, int], programs: Sequence[Measured]
) -> Table:
    """A table of all figures, with one column per program."""
    chip = accelerators.chip
    sizes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
    unit, count = "GPU" if chip.gpu else "core", len(accelerators.devices)
    result = Table(
        title=f"{accelerators.name}: {count} {unit}{'s' * (count > 1)}, {sizes}",
        caption=(
            f"Per {unit}. The roofline is the minimum time that the chip's peak "
            "figures allow; it is not a measurement."
        ),
        title_justify="left",
        caption_justify="left",
    )
    result.add_column("")
    for one in programs:
        result.add_column(one.program.name, justify="right")

    def row(label: str, *values: str, **style: Any) -> None:
        result.add_row(label, *values, **style)

    row("program", *(one.program.about for one in programs))
    row("compilation", *(f"{one.seconds:.0f} s" for one in programs))
    result.add_section()
    for name in ("arguments", "outputs", "donated", "temporaries", "code"):
        sign = "-" if name == "donated" else ""
        row(
            f"HBM: {name}",
            *(f"{sign}{_gib(getattr(one.memory, name))}" for one in programs),
        )
    row(
        f"HBM: total, of {_gib(chip.usable)}",
        *(_gib(one.memory.needed) for one in programs),
        style="bold",
    )
    result.add_section()
    row(
        "FLOPs, the compiler's count",
        *("-" if (x := one.xla_flops) is None else _tera(x) for one in programs),
    )
    row(
        "FLOPs, loops counted as they run",
        *(_tera(one.costs.flops) for one in programs),
    )
    row(
        "FLOPs, the model's own",
        *(_tera(one.program.model_flops / one.cores) for one in programs),
    )
    row("bytes, HBM", *(f"{one.costs.hbm_bytes / 1e9:,.2f} GB" for one in programs))
    row("bytes, links", *(f"{one.link_bytes / 1e9:,.3f} GB" for one in programs))
    several = accelerators.slices > 1
    if several:
        row(
            "bytes, network",
            *(f"{one.network_bytes / 1e9:,.3f} GB" for one in programs),
        )
    row("loops counted once", *(f"{one.costs.open_loops}" for one in programs))
    result.add_section()
    for name in ("compute", "memory", "links"):
        times = (_ms(getattr(one.times, name)) for one in programs)
        row(f"minimum time, {name}", *times)
    if several and chip.network is None:
        row("minimum time, network", *("unknown" for _ in programs))
    elif several:
        row("minimum time, network", *(_ms(one.times.network) for one in programs))
    row(
        "roofline",
        *(f"{_ms(one.times.seconds)} ({one.times.bound})" for one in programs),
        style="bold",
    )
    row("tokens per second, at the roofline", *(_rate(one) for one in programs))
    row("MFU, at the roofline", *(f"{one.mfu:.1%}" for one in programs))
    return result


def collectives(program: Measured) -> Table:
    """A table of the collectives, the largest first."""
    result = Table(title=f"{program.program.name}: collectives", title_justify="left")
    for name in ("kind", "group", "runs", "bytes sent", "total"):
        result.add_column(name, justify="left" if name == "kind" else "right")
    for kind, size, count, sent in summed_collectives(program):
        result.add_row(
            kind,
            f"{size}",
            f"{count:,}",
            f"{sent / count / 1e6:,.2f} MB",
            f"{sent / 1e9:,.3f} GB",
        )
    return result


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
        "versions": {
            name: importlib.metadata.version(name)
            for name in _PACKAGES
            if importlib.util.find_spec(name.replace("-", "_"))
        },
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


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.4g} T"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f} ms"


def _rate(one: Measured) -> str:
    """Tokens per second; a lower bound for decoding."""
    least = "at least " if one.program.name == "decode" else ""
    return f"{least}{one.tokens_per_second:,.0f}"
