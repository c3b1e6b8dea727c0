"""Compiles a program for a slice and measures the result."""

import dataclasses
import re
import time

import jax
from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.compilation import gpus
from bpd_jax.compilation.costs import Costs, costs_of
from bpd_jax.compilation.hlo import parse
from bpd_jax.compilation.programs import Program
from bpd_jax.compilation.roofline import (
    Roofline,
    link_bytes,
    network_bytes,
    roofline,
)
from bpd_jax.compilation.topology import Slice
from bpd_jax.storage.buckets import as_path
from bpd_jax.storage.files import write_text

_REMEDY = (
    "shard the parameters over more devices (MeshConfig.fsdp, model), store fewer "
    "activations (ComputeConfig.remat, loss_chunk) or split the batch "
    "(ComputeConfig.accumulate)"
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of the memory of one core or GPU.

    Attributes:
      arguments: arguments, including donated ones.
      outputs: results, including those in donated memory.
      donated: results that reuse the memory of arguments.
      temporaries: temporary memory.
      code: the program itself.
      usable: memory that a program may use.
    """

    arguments: int
    outputs: int
    donated: int
    temporaries: int
    code: int
    usable: int

    @property
    def needed(self) -> int:
        """Total memory."""
        parts = self.arguments + self.outputs - self.donated
        return parts + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Measured:
    """A compiled program; all costs are those of one core or GPU and one run.

    Attributes:
      program: the program.
      cores: number of devices that it runs on.
      seconds: duration of the compilation.
      memory: see `Memory`.
      xla_flops: the compiler's own count, in which the body of a loop counts once; None
        if it gives none.
      costs: costs with loops; see `costs`.
      link_bytes: bytes sent to other chips of the slice.
      network_bytes: bytes sent to other slices.
      times: the roofline.
      peak_flops: peak FLOPs per second of one core or GPU.
    """

    program: Program
    cores: int
    seconds: float
    memory: Memory
    xla_flops: float | None
    costs: Costs
    link_bytes: float
    network_bytes: float
    times: Roofline
    peak_flops: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all cores, at the roofline."""
        return self.program.tokens / self.times.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of all cores in the roofline's time."""
        possible = self.times.seconds * self.cores * self.peak_flops
        return self.program.model_flops / possible


def compile_for(
    program: Program, mesh: Mesh, accelerators: Slice, folder: str | None = None
) -> Measured:
    """Compiles a program with the compiler of the slice's chips.

    Args:
      program: the program.
      mesh: mesh over the devices of the slice.
      accelerators: the slice, or the GPUs of a host.
      folder: output folder of the compiled text, `NAME.txt`; None writes nothing.

    Raises:
      UserError: the program needs more memory than a core or a GPU has.
    """
    start = time.perf_counter()
    lowered = program.lower()
    chip = accelerators.chip
    try:
        compiled = lowered.compile(gpus.COMPILER_OPTIONS if chip.gpu else None)
    except jax.errors.JaxRuntimeError as error:
        refused = out_of_memory(str(error))
        if refused is None:
            raise
        raise _refusal(program, accelerators, refused) from error
    seconds = time.perf_counter() - start
    text, analysis = compiled.as_text() or "", compiled.memory_analysis()
    # None for a GPU.
    xla_costs = compiled.cost_analysis() or {}
    assert analysis is not None
    if folder is not None:
        write_text(as_path(folder) / f"{program.name}.txt", text)
    # One program for a slice; its partitions are the devices of the first one.
    partitions = mesh.size // accelerators.slices
    costs = costs_of(parse(text), partitions)
    coordinates = [accelerators.coordinates(x) for x in mesh.devices.flat[:partitions]]
    memory = Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        donated=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
        usable=chip.usable,
    )
    if chip.gpu is not None and memory.needed > memory.usable:
        # The GPU compiler does not refuse such a program.
        needed, usable = (f"{x / 2**30:.2f} GiB" for x in (memory.needed, chip.usable))
        reason = f"it needs {needed} of the {usable} of a GPU"
        raise _refusal(program, accelerators, reason)
    return Measured(
        program=program,
        cores=mesh.size,
        seconds=seconds,
        memory=memory,
        xla_flops=xla_costs.get("flops"),
        costs=costs,
        link_bytes=link_bytes(costs, coordinates),
        network_bytes=network_bytes(costs, accelerators.slices),
        times=roofline(
            costs, chip, accelerators.sides, coordinates, accelerators.slices
        ),
        peak_flops=chip.flops / chip.cores,
    )


def _refusal(program: Program, accelerators: Slice, reason: str) -> UserError:
    return UserError(
        f"the {program.name} step does not fit on {accelerators.name}: {reason}; "
        f"{_REMEDY}."
    )


_REFUSALS = (
    re.compile(r"memory space hbm\. Used (\S+) of (\S+) hbm"),
    re.compile(r"required for [^(]*\((\S+)\) exceeds available HBM \((\S+)\)"),
)


def out_of_memory(message: str) -> str | None:
    """The compiler's message, if the program needs too much memory.

    >>> out_of_memory(
    ...     "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
    ...     "memory space hbm. Used 49.20G of 15.25G hbm. Exceeded hbm capacity by 34G."
    ... )
    'it needs 49.20 GiB of the 15.25 GiB of a core'
    """
    if not message.startswith("RESOURCE_EXHAUSTED"):
        return None
    for refusal in _REFUSALS:
        if match := refusal.search(message):
            needed, usable = (re.sub(r"([KMGT])$", r" \1iB", x) for x in match.groups())
            return f"it needs {needed} of the {usable} of a core"
    return None
