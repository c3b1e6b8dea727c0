"""The minimum time of a program on a chip (roofline)."""

import dataclasses
from collections.abc import Sequence

from bpd_jax.compilation.chips import Chip
from bpd_jax.compilation.collectives import Collective
from bpd_jax.compilation.costs import Costs


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Times of one run by resource, in seconds."""

    compute: float
    memory: float
    links: float
    network: float = 0.0

    @property
    def seconds(self) -> float:
        """The longest of the times, a lower bound even with perfect overlap."""
        return max(self.compute, self.memory, self.links, self.network)

    @property
    def bound(self) -> str:
        """The resource with the longest time."""
        names = ("compute", "memory", "links", "network")
        return max(names, key=lambda name: getattr(self, name))


def roofline(
    costs: Costs,
    chip: Chip,
    sides: Sequence[int],
    coordinates: Sequence[Sequence[int]],
    slices: int = 1,
) -> Roofline:
    """The roofline of one device; without the network if its speed is unknown.

    Args:
      costs: costs of one device.
      chip: its peak figures, shared evenly by the cores of a chip.
      sides: chips along each side of the slice.
      coordinates: coordinates of the chip of each device, in the order of the program's
        partitions.
      slices: number of slices.
    """
    sent = network_bytes(costs, slices)
    return Roofline(
        compute=costs.flops / (chip.flops / chip.cores),
        memory=costs.hbm_bytes / (chip.hbm / chip.cores),
        links=sum(
            count * link_seconds(collective, chip, sides, coordinates)
            for collective, count in costs.collectives.items()
        ),
        network=sent / (chip.network / chip.cores) if chip.network else 0.0,
    )


def link_seconds(
    collective: Collective,
    chip: Chip,
    sides: Sequence[int],
    coordinates: Sequence[Sequence[int]],
) -> float:
    """The minimum time of one collective.

    A group of devices along some dimensions of the torus can use the links of those
    dimensions: two per chip where it fills a dimension with wrap-around links, else one
    (the ends of a line have one). Cores of a chip that belong to different groups
    share its links; those of one group pass on what the chip has received. A group
    inside one chip uses none.

    Worked example: 8 bytes to send on each core of a v4, in groups of four chips along
    a side of 4 that hold one core of each chip: 8 · 2 / (2 · 45e9) seconds.
    """
    group = [tuple(coordinates[device]) for device in collective.groups[0]]
    links = 0
    for axis, side in enumerate(sides):
        extent = len({coordinate[axis] for coordinate in group})
        if extent > 1:
            links += 2 if extent == side and side % chip.wraps == 0 else 1
    if not links:
        return 0.0
    sharing = chip.cores / (len(group) / len(set(group)))
    return collective.sent * sharing / (links * chip.link)


def link_bytes(costs: Costs, coordinates: Sequence[Sequence[int]]) -> float:
    """Bytes that one device sends to other chips."""
    total = 0.0
    for collective, count in costs.collectives.items():
        if len({tuple(coordinates[device]) for device in collective.groups[0]}) > 1:
            total += count * collective.sent
    return total


def network_bytes(costs: Costs, slices: int) -> float:
    """Bytes that one device sends to other slices, at least.

    Of n bytes that each of s slices has: 2 n (s-1) / s for an all-reduce, n (s-1) / s
    for a reduce-scatter and an all-to-all, n (s-1) for an all-gather; else n.
    """
    shares = {
        "ALL_REDUCE": 2 * (slices - 1) / slices,
        "REDUCE_SCATTER": (slices - 1) / slices,
        "ALL_TO_ALL": (slices - 1) / slices,
        "ALL_GATHER": slices - 1,
    }
    return sum(shares.get(kind, 1) * nbytes for kind, nbytes in costs.network.items())
