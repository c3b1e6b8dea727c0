"""Peak figures of the chips, from public sources."""

import dataclasses

from bpd_jax.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak figures of one chip.

    Sources: the pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e" of Google Cloud's
    documentation for FLOPs, HBM and the shape of the network, and the table of chapter
    2 of "How to Scale Your Model" (Austin et al. 2025) for one link in one direction.
    `usable` is from the compiler's message when it refuses a program. `network` is an
    even share of the figure of a pod of 256 chips on the page "TPU v6e", which has
    those of v5e too. Of GPUs: NVIDIA's data sheets of the A100, H100 and H200 (SXM)
    for FLOPs without sparsity, memory and NVLink; `usable` is what the driver reports,
    which jax uses if XLA_PYTHON_CLIENT_MEM_FRACTION allows it.

    Attributes:
      name: prefix of its topologies, such as `v4` or `h100`.
      cores: devices that jax sees on a chip. A v4 shows its two cores one by one, or,
        as on the hosts of Google Cloud, as one (`v4-megacore`).
      flops: dense bf16 FLOPs per second of a chip.
      hbm: bytes per second of a chip's memory.
      usable: bytes of memory that a program on one core may use.
      link: bytes per second of one link in one direction; of a GPU those of all its
        links, which a switch joins to all others.
      dimensions: dimensions of the torus of chips; 1 for GPUs.
      wraps: a dimension of a slice has wrap-around links if its length is a multiple
        of this.
      network: bytes per second that a chip can send to other slices; None where no
        public figure is known.
      gpu: the capability of a GPU, a key of `gpus.ARCHITECTURES`; None for a TPU.
    """

    name: str
    cores: int
    flops: float
    hbm: float
    usable: int
    link: float
    dimensions: int
    wraps: int
    network: float | None = None
    gpu: str | None = None


# GPUs behind a switch form no ring.
_NEVER = 1_000_000


def _gib(size: float) -> int:
    return int(size * 2**30)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 2, 275e12, 1.228e12, _gib(15.25), 4.5e10, 3, 4),
        Chip("v4-megacore", 1, 275e12, 1.228e12, _gib(30.75), 4.5e10, 3, 4),
        Chip("v5e", 1, 197e12, 8.19e11, _gib(15.75), 4.5e10, 2, 16, 6.4e12 / 8 / 256),
        Chip("v5p", 1, 459e12, 2.765e12, _gib(95.74), 9e10, 3, 4),
        Chip("v6e", 1, 918e12, 1.638e12, _gib(31.25), 9e10, 2, 16, 25.6e12 / 8 / 256),
        Chip("a100", 1, 312e12, 2.039e12, _gib(79), 3e11, 1, _NEVER, gpu="8.0"),
        Chip("h100", 1, 989e12, 3.35e12, _gib(79), 4.5e11, 1, _NEVER, gpu="9.0"),
        Chip("h200", 1, 989e12, 4.8e12, _gib(139), 4.5e11, 1, _NEVER, gpu="9.0"),
    )
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as `v4:4x4x4`.

    Raises:
      UserError: the chip is unknown.
    """
    chip = CHIPS.get(topology.partition(":")[0])
    if chip is None:
        raise UserError(
            f"--topology={topology} is not known: give a chip ({', '.join(CHIPS)}) and "
            "the sides of a slice or the number of GPUs, as in v4:4x4x4, v5e:4x4 or "
            "h100:8."
        )
    return chip
