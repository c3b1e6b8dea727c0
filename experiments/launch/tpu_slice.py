"""A slice of Cloud TPU VMs: the commands that make, prepare, use and replace it.

Every worker gets the same commands (`--worker=all`); jax finds the others by itself.
The run's folder lies on a share that all workers mount (Filestore, or any NFS), because
all of them write checkpoints, which are renamed when they are whole.
"""

import dataclasses
import math
import re
import shlex
import time
from collections.abc import Callable

from bpd_jax.errors import UserError
from experiments.launch.commands import Command, Runner

# Cloud's name of a chip, its newest image, and the devices that jax may see on one: the
# two cores of a v4 or v5p chip act as one unless the compiler is told otherwise.
CHIPS = {
    "v4": ("v4", "tpu-ubuntu2204-base", (1, 2)),
    "v5e": ("v5litepod", "v2-alpha-tpuv5-lite", (1,)),
    "v5p": ("v5p", "v2-alpha-tpuv5", (1, 2)),
    "v6e": ("v6e", "v2-alpha-tpuv6e", (1,)),
}
SHARE = "share"  # where it is mounted, in the home folder
_BUNDLE = "bpd_jax.bundle"


@dataclasses.dataclass(frozen=True)
class TpuSlice:
    """Which slice, and what its workers need.

    Attributes:
      name: of the slice.
      zone: such as `us-central2-b`.
      topology: chip and sides, such as `v4:4x4x4`.
      share: what workers mount, such as `10.0.0.2:/runs`.
      project: None for the one that gcloud is set to.
      spot: whether Cloud may take it back at any time, at a lower price.
    """

    name: str
    zone: str
    topology: str
    share: str
    project: str | None = None
    spot: bool = False

    def __post_init__(self) -> None:
        chip, _, sides = self.topology.partition(":")
        if chip not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", sides):
            raise UserError(
                f"--topology={self.topology} is not known: give a chip "
                f"({', '.join(CHIPS)}) and the sides of a slice, as in v4:4x4x4."
            )
        if not re.fullmatch(r"[^:\s]+:/\S*", self.share):
            raise UserError(
                f"--share={self.share} is not HOST:/FOLDER, as mount takes it."
            )

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of devices that jax may see."""
        chip, _, sides = self.topology.partition(":")
        chips = math.prod(int(side) for side in sides.split("x"))
        return tuple(chips * cores for cores in CHIPS[chip][2])

    def create(self) -> Command:
        """Asks Cloud for the slice."""
        chip, _, sides = self.topology.partition(":")
        kind, image, _ = CHIPS[chip]
        return self._command(
            "ask for the slice",
            "create",
            self.name,
            f"--type={kind}",
            f"--topology={sides}",
            f"--version={image}",
            *(["--spot"] if self.spot else []),
        )

    def delete(self) -> Command:
        """Gives the slice back, or what is left of it."""
        return self._command("give the slice back", "delete", self.name, "--quiet")

    def describe(self) -> Command:
        """Prints the slice's state, such as READY or PREEMPTED."""
        return self._command(
            "its state", "describe", self.name, "--format=value(state)"
        )

    def prepare(self) -> list[Command]:
        """What a new slice needs: the committed source, Python, packages, the share."""
        setup = (
            f"git init -q bpd_jax && git -C bpd_jax fetch -q ../{_BUNDLE} HEAD && "
            "git -C bpd_jax checkout -q --detach FETCH_HEAD && "
            f"bash bpd_jax/experiments/launch/tpu_setup.sh {shlex.quote(self.share)}"
        )
        # Inside .git, where it is no file of the checkout.
        packed = f".git/{_BUNDLE}"
        return [
            Command(
                "pack what is committed", ("git", "bundle", "create", packed, "HEAD")
            ),
            self._command(
                "send it to every worker",
                "scp",
                packed,
                f"{self.name}:{_BUNDLE}",
                "--worker=all",
            ),
            self._ssh("Python, packages and the share, on every worker", setup),
        ]

    def copy_data(self, bucket: str, workdir: str) -> Command:
        """Copies prepared rows from a bucket into the run's folder, on one worker."""
        folder = shlex.quote(f"{SHARE}/{workdir}/data")
        source = shlex.quote(bucket)
        return self._ssh(
            "prepared rows into the run's folder",
            f"mkdir -p {folder} && gcloud storage rsync -r {source} {folder}",
            worker="0",
        )

    def train(self, words: tuple[str, ...]) -> Command:
        """Trains on every worker until it ends; a second one beside it is refused."""
        return self._ssh(
            "train, on every worker",
            f"cd bpd_jax && flock -n ../bpd_jax.lock {shlex.join(words)}",
        )

    def _ssh(self, about: str, script: str, worker: str = "all") -> Command:
        return self._command(
            about, "ssh", self.name, f"--worker={worker}", f"--command={script}"
        )

    def _command(self, about: str, *words: str) -> Command:
        project = [] if self.project is None else [f"--project={self.project}"]
        place = [f"--zone={self.zone}", *project]
        return Command(about, ("gcloud", "compute", "tpus", "tpu-vm", *words, *place))


def keep_training(
    tpu: TpuSlice,
    training: Command,
    preparation: list[Command],
    run: Runner,
    state: Callable[[], str],
    *,
    retries: int,
    pause: float,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Trains to the end, on as many slices as it takes.

    Training that ends with an error on a slice that is still there is started again
    `retries` times: it goes on from its newest checkpoint. A slice that Cloud has taken
    back is replaced, however often, and asked for again every `pause` seconds while
    there is none to be had.

    Args:
      tpu: the slice.
      training: the command that trains.
      preparation: what a new slice needs.
      run: runs a command and returns its exit status.
      state: the slice's state now, "" if there is no such slice.
      retries: see above.
      pause: seconds.
      sleep: waits for so many seconds.

    Raises:
      UserError: a slice cannot be made or prepared, or training fails by itself.
    """
    found = state()
    if not found:
        _do(tpu.create(), run)
    elif found != "READY":
        _replace(tpu, run, pause, sleep)
    _prepare(preparation, run)
    failures = 0
    while run(training):
        if state() == "READY":
            failures += 1
            if failures > retries:
                raise UserError(
                    f"training on {tpu.name} ended with an error {failures} times: "
                    "what it printed tells why; the same command goes on."
                )
            continue
        _replace(tpu, run, pause, sleep)
        _prepare(preparation, run)


def _replace(
    tpu: TpuSlice, run: Runner, pause: float, sleep: Callable[[float], object]
) -> None:
    # There may be nothing left to delete.
    run(tpu.delete())
    while run(tpu.create()):
        sleep(pause)


def _prepare(preparation: list[Command], run: Runner) -> None:
    for command in preparation:
        _do(command, run)


def _do(command: Command, run: Runner) -> None:
    status = run(command)
    if status:
        raise UserError(
            f"could not {command.about}: {command.words[0]} ended with status {status}."
        )
