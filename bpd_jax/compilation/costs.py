"""Costs of one run of a compiled program: FLOPs, memory traffic, collectives.

XLA's own `cost_analysis` counts the body of a loop once. Here the body of a loop with a
known trip count is multiplied by it, and that of an open-ended loop (the decode loop)
counts once. For a conditional, the branch with the least memory traffic counts, because
the other branch of our programs is rare (a search with a larger capacity).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

from bpd_jax.compilation.collectives import (
    COLLECTIVES,
    Collective,
    collective_of,
)
from bpd_jax.compilation.hlo import Computation, Instruction, Module
from bpd_jax.compilation.instruction_flops import (
    CUBLAS,
    convolution_flops,
    dot_flops,
    kernel_flops,
    matmul_flops,
)
from bpd_jax.compilation.traffic import traffic

# Instructions without memory traffic, or whose traffic is counted elsewhere.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"),
}

# Custom calls without effect.
_FREE_CALLS = {
    *("AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding"),
    *("AsyncCollectiveStart", "AsyncCollectiveDone"),
}

# Transfers data from one slice to another through the hosts.
_MEGASCALE = "xla_megascale_runtime"


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of one device.

    Attributes:
      flops: FLOPs of matrix products, two per multiply-add, and of the kernels that
        `flops` supports.
      other_bytes: bytes read from and written to the HBM, counting each operand and
        result of every instruction once, without collectives.
      collectives: number of runs of each collective.
      kernels: number of runs of each custom call, by name.
      open_loops: number of loops with an unknown trip count; one iteration is counted.
      network: bytes sent to other TPU slices by kind of collective, such as
        `ALL_REDUCE`.
    """

    flops: float = 0.0
    other_bytes: float = 0.0
    collectives: Counter[Collective] = dataclasses.field(default_factory=Counter)
    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    open_loops: int = 0
    network: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def hbm_bytes(self) -> float:
        """All bytes read from and written to the HBM."""
        exchanged = sum(n * key.hbm_bytes for key, n in self.collectives.items())
        return self.other_bytes + exchanged

    def __add__(self, other: "Costs") -> "Costs":
        names = (field.name for field in dataclasses.fields(self))
        return Costs(*(getattr(self, x) + getattr(other, x) for x in names))

    def times(self, count: int) -> "Costs":
        """The costs of `count` runs."""

        def multiplied(runs: Counter[Any]) -> Counter[Any]:
            return Counter({key: count * n for key, n in runs.items()})

        return Costs(
            self.flops * count,
            self.other_bytes * count,
            multiplied(self.collectives),
            multiplied(self.kernels),
            self.open_loops,
            multiplied(self.network),
        )


def costs_of(module: Module, devices: int) -> Costs:
    """Costs of one run of a program that is partitioned over `devices`."""
    computed: dict[tuple[str, bool], Costs] = {}

    def of(name: str, fused: bool) -> Costs:
        if (name, fused) not in computed:
            computation = module.computations[name]
            total = Costs()
            for instruction in computation.instructions.values():
                costs = _costs_of_instruction(
                    module, computation, instruction, devices, fused, of
                )
                if instruction.opcode == "fusion":
                    costs = _new_collectives(costs, total)
                total += costs
            computed[name, fused] = total
        return computed[name, fused]

    return of(module.entry, False)


def _new_collectives(costs: Costs, total: Costs) -> Costs:
    """Leaves out the collectives of a fusion that earlier fusions have started.

    The TPU compiler overlaps a collective with several fusions; each of them contains
    the collective, with the same channel.
    """
    started = {collective.channel for collective in total.collectives}
    new = {
        collective: count
        for collective, count in costs.collectives.items()
        if not collective.channel or collective.channel not in started
    }
    return dataclasses.replace(costs, collectives=Counter(new))


def _costs_of_instruction(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    devices: int,
    fused: bool,
    of: Callable[[str, bool], Costs],
) -> Costs:
    """Costs of one instruction; instructions inside a fusion do not access the HBM."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return Costs()
    if opcode == "while":
        body = of(instruction.word("body"), fused)
        trips = module.trips(computation, instruction)
        return body + Costs(open_loops=1) if trips is None else body.times(trips)
    if opcode == "conditional":
        branches = [of(name, fused) for name in instruction.called]
        return min(branches, key=lambda costs: costs.hbm_bytes)
    if opcode in ("call", "async-start"):
        return of(instruction.called[0], fused)
    if opcode.removesuffix("-start") in COLLECTIVES:
        collective = collective_of(computation, instruction, devices)
        return Costs(collectives=Counter({collective: 1}))
    total = Costs()
    if opcode == "send" and _MEGASCALE in instruction.attributes:
        # The host's runtime forwards the data.
        kind = instruction.word("_xla_megascale_transfer_type").strip('"')
        nbytes = computation.operands(instruction)[0].nbytes
        total = Costs(network=Counter({kind: nbytes}))
    elif opcode == "fusion":
        total = of(instruction.called[0], True)
    elif opcode == "custom-call":
        target = instruction.word("custom_call_target")
        if target in _FREE_CALLS:
            return total
        total = _kernel(computation, instruction)
    elif opcode == "dot":
        total = Costs(flops=dot_flops(computation, instruction))
    elif opcode == "convolution":
        total = Costs(flops=convolution_flops(computation, instruction))
    if fused:
        return total
    return total + Costs(other_bytes=traffic(module, computation, instruction))


def _kernel(computation: Computation, instruction: Instruction) -> Costs:
    shapes = [x for made in computation.operands(instruction) for x in made.shapes]
    name = instruction.word("custom_call_target")
    if name == "tpu_custom_call":
        # Without the number that makes it unique.
        name = instruction.name.rstrip(".0123456789")
    if name.startswith(CUBLAS):
        flops = matmul_flops(shapes, instruction.shapes[0], instruction.attributes)
    else:
        flops = kernel_flops(name, shapes, instruction.attributes)
    return Costs(flops=flops, kernels=Counter({name: 1}))
