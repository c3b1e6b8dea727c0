"""Collectives: how much devices exchange, and in which groups."""

import dataclasses
import itertools
import math
import re

import numpy as np

from bpd_jax.compilation.hlo import Computation, Instruction

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation.

    Attributes:
      kind: one of `COLLECTIVES`.
      nbytes: bytes of its operands on one device.
      hbm_bytes: bytes of operands and results in the HBM.
      groups: the devices that exchange data with each other, by partition.
      channel: its channel in the program.
    """

    kind: str
    nbytes: int
    hbm_bytes: int
    groups: tuple[tuple[int, ...], ...]
    channel: str

    @property
    def group_size(self) -> int:
        """g, the number of devices of a group."""
        return len(self.groups[0])

    @property
    def sent(self) -> float:
        """Bytes that each device sends, at least.

        Of n bytes of operands on each of g devices: (g-1) n for an all-gather, whose
        result is g n; 2 n (g-1) / g for an all-reduce (a reduce-scatter and an
        all-gather); n (g-1) / g for a reduce-scatter and an all-to-all; else n.
        """
        peers = self.group_size - 1
        if self.kind == "all-gather":
            return self.nbytes * peers
        if self.kind == "all-reduce":
            return 2 * self.nbytes * peers / self.group_size
        if self.kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
            return self.nbytes * peers / self.group_size
        return self.nbytes if peers else 0


def collective_of(
    computation: Computation, instruction: Instruction, devices: int
) -> Collective:
    """Reads an instruction that is one of `COLLECTIVES`.

    Args:
      computation: the computation that contains it.
      instruction: the collective, or the start of one.
      devices: number of partitions.
    """
    operands = computation.operands(instruction)
    kind = instruction.opcode.removesuffix("-start")
    results = instruction.shapes
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        # A tuple that contains the operands as well.
        results = results[len(operands) :]
    users = computation.users[instruction.name]
    if kind == "all-reduce" and {user.opcode for user in users} == {"dynamic-slice"}:
        # The TPU compiler's form of a reduce-scatter, inside a fusion.
        kind = "reduce-scatter"
        results = tuple(shape for user in users for shape in user.shapes)
    return Collective(
        kind=kind,
        nbytes=sum(shape.nbytes for x in operands for shape in x.shapes),
        hbm_bytes=sum(x.nbytes for x in operands)
        + sum(shape.nbytes for shape in results if shape.space == 0),
        groups=device_groups(instruction, devices),
        channel=instruction.word("channel_id"),
    )


def device_groups(
    instruction: Instruction, devices: int
) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that exchange data in a collective, by partition number.

    The three forms that the compiler writes:

      replica_groups={{0,1},{2,3}}
      replica_groups=[2,2]<=[2,2]T(1,0)           rows of a transposed array of numbers
      replica_groups=mesh['a'=2,'b'=2] {'b'}      an axis, or part of one: 'b':(1)2;
                                                  device_ids=(…) may number the devices

    A `collective-permute` has pairs instead: devices that one chain of pairs joins are
    a group.

    Args:
      instruction: the collective.
      devices: number of partitions; an empty list of groups means all of them.
    """
    text = instruction.attributes
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        edges = re.findall(r"(\d+),(\d+)", pairs[1])
        return _chains([(int(a), int(b)) for a, b in edges])
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return tuple(tuple(map(int, group.split(","))) for group in groups)
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text
    )
    if iota:
        shape, sizes = (tuple(map(int, iota[i].split(","))) for i in (1, 2))
        axes = tuple(map(int, iota[3].split(","))) if iota[3] else None
        return _rows(_numbers(sizes).transpose(axes).reshape(shape))
    mesh = re.search(r"replica_groups=mesh\[(.*?)\](.*?)\{(.*?)\}", text)
    if mesh:
        indices = _along_axes(mesh[1], mesh[3])
        order = _device_order(mesh[2])
        if order is None:
            return indices
        return tuple(tuple(int(order[x]) for x in group) for group in indices)
    return (tuple(range(devices)),)


def _device_order(text: str) -> np.ndarray | None:
    """The devices of a mesh, row by row: `device_ids=([4,2]T(1,0))` or a list."""
    if match := re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", text):
        sizes = tuple(map(int, match[1].split(",")))
        axes = tuple(map(int, match[2].split(","))) if match[2] else None
        return _numbers(sizes).transpose(axes).reshape(-1)
    if match := re.search(r"device_ids=\(([\d,]+)\)", text):
        return np.array([int(x) for x in match[1].split(",")])
    return None


def _numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def _rows(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(int(x) for x in row) for row in array.reshape(-1, array.shape[-1])
    )


def _along_axes(mesh: str, axes: str) -> tuple[tuple[int, ...], ...]:
    """Groups along axes of a mesh whose devices are numbered row by row."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts: list[int] = []
    moving: list[int] = []
    requested = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    for name, size in sizes.items():
        inside = []
        for axis, before, width in requested:
            if axis == name:
                low = int(before or 1)
                inside.append((low, low * int(width or size)))
        # Split the axis at the bounds of its part: 8 with (2)2 is 2 × 2 × 2.
        cuts = sorted({1, size, *(edge for part in inside for edge in part)})
        for low, high in itertools.pairwise(cuts):
            if any(begin <= low and high <= end for begin, end in inside):
                moving.append(len(parts))
            parts.append(high // low)
    still = [axis for axis in range(len(parts)) if axis not in moving]
    width = math.prod(parts[axis] for axis in moving)
    array = _numbers(tuple(parts)).transpose(*still, *moving)
    return _rows(array.reshape(-1, width))


def _chains(pairs: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """The connected components of pairs of devices, each sorted."""
    group_of: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = group_of.get(source, {source}) | group_of.get(target, {target})
        for device in joined:
            group_of[device] = joined
    unique = {id(group): group for group in group_of.values()}
    return tuple(sorted(tuple(sorted(group)) for group in unique.values()))
