"""Peak figures of the chips, from public sources, and topologies such as `v4:4x4x4`."""

import dataclasses
import math
import re

from bpd_jax.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak figures of one chip.

    Sources: the pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e" of Google Cloud's
    documentation; NVIDIA's data sheets of L4, A100, H100 and H200 (SXM). `usable` is
    from the TPU compiler's message when it refuses a program; of a GPU it is what the
    driver reports, which jax uses if XLA_PYTHON_CLIENT_MEM_FRACTION allows it.

    Attributes:
      name: prefix of its topologies, such as `v4` or `h100`.
      cores: devices that jax sees on a chip. A v4 shows its two cores one by one, or,
        as on the hosts of Google Cloud, as one (`v4-megacore`).
      flops: dense bf16 FLOPs per second of a chip.
      hbm: bytes per second of a chip's memory.
      usable: bytes of memory that a program on one core may use.
      dimensions: dimensions of the torus of chips; 1 for GPUs.
      kind: how jax's `device_kind` of its devices begins; "" if another chip has it.
      gpu: the capability of a GPU, a key of `compiler.ARCHITECTURES`; None for a
        TPU.
    """

    name: str
    cores: int
    flops: float
    hbm: float
    usable: int
    dimensions: int
    kind: str
    gpu: str | None = None


def _gib(size: float) -> int:
    return int(size * 2**30)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 2, 275e12, 1.228e12, _gib(15.25), 3, ""),
        Chip("v4-megacore", 1, 275e12, 1.228e12, _gib(30.75), 3, "TPU v4"),
        Chip("v5e", 1, 197e12, 8.19e11, _gib(15.75), 2, "TPU v5 lite"),
        Chip("v5p", 1, 459e12, 2.765e12, _gib(95.74), 3, "TPU v5"),
        Chip("v6e", 1, 918e12, 1.638e12, _gib(31.25), 2, "TPU v6"),
        Chip("l4", 1, 121e12, 3e11, _gib(22), 1, "NVIDIA L4", gpu="8.9"),
        Chip("a100", 1, 312e12, 2.039e12, _gib(79), 1, "NVIDIA A100", gpu="8.0"),
        Chip("h100", 1, 989e12, 3.35e12, _gib(79), 1, "NVIDIA H100", gpu="9.0"),
        Chip("h200", 1, 989e12, 4.8e12, _gib(139), 1, "NVIDIA H200", gpu="9.0"),
    )
}


def chip_of_device(kind: str) -> Chip | None:
    """The chip of jax's `device_kind`; None if it is unknown.

    >>> chip_of_device("TPU v5 lite").name, chip_of_device("TPU v5").name
    ('v5e', 'v5p')
    """
    # Some versions of jax name the v5e so.
    kind = kind.replace("TPU v5e", "TPU v5 lite")
    matching = [x for x in CHIPS.values() if x.kind and kind.startswith(x.kind)]
    return max(matching, key=lambda chip: len(chip.kind), default=None)


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as `v4:4x4x4`."""
    chip = CHIPS.get(topology.partition(":")[0])
    if chip is None:
        raise UserError(
            f"--topology={topology} is not known: give a chip ({', '.join(CHIPS)}) and "
            "the sides of a slice or the number of GPUs, as in v4:4x4x4, v5e:4x4 or "
            "h100:8."
        )
    return chip


def sides_of(topology: str) -> tuple[int, ...]:
    """The chips along each side of a slice, or the number of GPUs of a host."""
    chip, text = chip_of(topology), topology.partition(":")[2]
    if not re.fullmatch("x".join([r"[1-9]\d*"] * chip.dimensions), text):
        needed = "number of GPUs" if chip.gpu else f"{chip.dimensions} dimensions"
        raise UserError(
            f"--topology={topology} must give the {needed} of a slice, for example "
            f"{chip.name}:{'x'.join(['4'] * chip.dimensions)}."
        )
    return tuple(map(int, text.split("x")))


def device_count(topology: str) -> int:
    """The number of devices that jax sees on a slice.

    >>> device_count("v4:4x4x4"), device_count("v5e:4x4")
    (128, 16)
    """
    return chip_of(topology).cores * math.prod(sides_of(topology))
