"""What a launcher runs: any command of bpd_jax, after checks on this machine."""

import dataclasses
import importlib.util
import itertools
import pathlib
import shlex
import subprocess
from collections.abc import Callable, Collection, Sequence
from typing import Any

from bpd_jax.base import cli, configuration, progress
from bpd_jax.base.configuration import Parsed
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.options import GIN_DEFAULTS, DecodeConfig
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from experiments import catalog

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN = "bpd_jax.train"
STUDIES = "experiments.run"
# Commands that several processes run together.
_DECODING = ("decode", "distill", "evaluate", "lm_eval", "tune")
SHARED = {TRAIN, STUDIES, *(f"bpd_jax.{name}" for name in _DECODING)}


@dataclasses.dataclass(frozen=True)
class Command:
    """One command line of a launcher: its purpose, and the program's words."""

    about: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"# {self.about}\n{shlex.join(self.words)}"


def run(command: Command) -> int:
    """Prints and runs a command, which inherits stdout and stderr."""
    progress.say(str(command))
    return subprocess.run(command.words, check=False).returncode


@dataclasses.dataclass(frozen=True)
class Program:
    """A command such as `bpd_jax.train`; paths are those of its machine."""

    module: str
    arguments: tuple[str, ...]

    def words(self, python: str) -> tuple[str, ...]:
        """The command line, with the path of an interpreter."""
        return (python, "-m", self.module, *self.arguments)

    def values(self, flag: str) -> tuple[str, ...]:
        """The values of a flag that is given as `--flag=value`."""
        start = f"--{flag}="
        return tuple(x[len(start) :] for x in self.arguments if x.startswith(start))


def parse_program(words: Sequence[str]) -> Program:
    """Reads the words after `--`: `train --gin_file=…`, `experiments.run table4 …`."""
    if not words or words[0].startswith("-"):
        raise UserError("give the command after --, as in `-- train --gin_file=…`.")
    module = words[0] if "." in words[0] else f"bpd_jax.{words[0]}"
    try:
        known = importlib.util.find_spec(module) is not None
    except ImportError:
        known = False
    if not known or not module.startswith(("bpd_jax.", "experiments.", "benchmarks.")):
        raise UserError(
            f"there is no command {words[0]}: give one of `bpd`, or experiments.run."
        )
    return Program(module, tuple(cli.rewrite_gin_arguments(words[1:])))


def check(
    program: Program,
    devices: Collection[int],
    slices: int = 1,
    check_folder: Callable[[str, str], None] = lambda flag, folder: None,
) -> tuple[str, ...]:
    """Checks the folders, settings and devices of a command.

    Args:
      program: the command.
      devices: every number of devices that jax may see, of all `slices` together.
      slices: number of TPU slices.
      check_folder: raises a `UserError` unless the machines can use a folder.

    Returns:
      The gin files that the command reads, with those that they include.
    """
    for flag in ("workdir", "output"):
        for folder in program.values(flag):
            check_folder(f"--{flag}", folder)
    files, bindings = program.values("gin_file"), program.values("gin_bindings")
    if decoding := _decoding_settings(program):
        meshes = [each.value.mesh for each in decoding if each.value.mesh is not None]
        for mesh, count in itertools.product(meshes, devices):
            mesh.shape(count, slices)
        return tuple({file: None for each in decoding for file in each.files})
    if program.module != TRAIN:
        return files
    for flag in ("workdir", "gin_file"):
        if not program.values(flag):
            raise UserError(f"--{flag} of the training is missing.")
    parsed = configuration.parse(files, bindings, TrainConfig, HeadsTrainConfig)
    config = parsed.value
    if config.start and "/" in config.start:
        check_folder(f"{type(config).__name__}.start", config.start)
    for count in devices if isinstance(config, TrainConfig) else ():
        data, fsdp, _ = config.mesh.shape(count, slices)
        parts = config.compute.accumulate
        if config.batch_size % (data * fsdp * parts):
            raise UserError(
                f"TrainConfig.batch_size = {config.batch_size} is not a multiple of "
                f"data × fsdp × accumulate = {data} × {fsdp} × {parts}: change "
                "MeshConfig or ComputeConfig.accumulate."
            )
    return parsed.files


def _decoding_settings(program: Program) -> list[Parsed[Any]]:
    """The settings of a command that decodes, one for each study; of others none."""
    files, bindings = program.values("gin_file"), program.values("gin_bindings")
    if program.module == STUDIES:
        size = (*program.values("size"), "tiny")[0]
        names = [word for word in program.arguments if not word.startswith("-")]
        chosen = catalog.choose(names, size)
        return [catalog.configure(name, size, files, bindings) for name in chosen]
    if program.module.removeprefix("bpd_jax.") in _DECODING:
        defaults = GIN_DEFAULTS
        return [configuration.parse(files, bindings, DecodeConfig, defaults=defaults)]
    return []


def check_travels(gin_files: Collection[str]) -> None:
    """Raises a `UserError` unless a checkout of HEAD elsewhere has the gin files."""
    for file in gin_files:
        if pathlib.Path(file).is_absolute() or git("ls-files", "--", file) != file:
            raise UserError(
                f"the gin file {file} is not a file of this repository: commit it, and "
                "give its path relative to the repository."
            )
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        raise UserError(
            f"{changed.split()[1]} has uncommitted changes: the workers get the "
            "committed files, so commit first."
        )


def git(*words: str) -> str:
    """The output of git in this checkout."""
    command = ["git", "-C", str(ROOT), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"git cannot read {ROOT}: launch from a checkout.")
    return done.stdout.strip()
