"""What a launcher runs: any command of bpd_jax, after checks on this machine."""

import dataclasses
import importlib.util
import itertools
import pathlib
import re
import shlex
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from bpd_jax.base import cli, configuration, progress
from bpd_jax.base.configuration import Parsed
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.loading import KNOWN_RUNS
from bpd_jax.decoding.options import GIN_DEFAULTS, DecodeConfig
from bpd_jax.drafting.assets import AssetPaths
from bpd_jax.training.config import FrozenConfig, TrainConfig
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.refiner_sources import RefinerTrainConfig
from experiments import catalog

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN = "bpd_jax.train"
STUDIES = "experiments.run"
DISTILL = "bpd_jax.distill"
# Commands that write into the folder of the model if there is no --output.
_BESIDE_MODEL = {"bpd_jax.evaluate", "bpd_jax.tune"}
# Commands that several processes run together.
SHARED = {TRAIN, STUDIES, DISTILL, "bpd_jax.decode", "bpd_jax.lm_eval", *_BESIDE_MODEL}
_REQUIRED = {TRAIN: ("workdir", "gin_file"), DISTILL: ("model", "output")}
# Files and folders: flags of those that are written; flags and settings of those that
# are read.
_WRITTEN = ("workdir", "output", "output_path")
_ASSETS = tuple(field.name for field in dataclasses.fields(AssetPaths))
_READ = (
    *("model", "heads", "weights", "start", "data", "states", "prompts_file"),
    *("answered", "text", "counts", "vocabulary", *_ASSETS),
)
# Commands that continue where they ended, of those that the time limit may stop.
RESUMED = {TRAIN, STUDIES, DISTILL}
# Flags without a value, which the name of a study may follow.
_SWITCHES = {"publish", "nopublish", "distributed", "nodistributed"}


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
        """The values of a flag, `--flag=value` or `--flag value`; of "" other words."""
        found, name = [], ""
        for word in self.arguments:
            if word.startswith("-"):
                name, is_whole, value = word.lstrip("-").partition("=")
                if is_whole:
                    found.append((name, value))
                if is_whole or name in _SWITCHES:
                    name = ""
            else:
                found.append((name, word))
                name = ""
        return tuple(value for name, value in found if name == flag)


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
        raise UserError(f"there is no command {words[0]}: give one that `bpd` lists.")
    return Program(module, tuple(cli.rewrite_gin_arguments(words[1:])))


def check(
    program: Program,
    devices: Collection[int],
    slices: int = 1,
    processes: int = 1,
    alone: str = "",
    check_folder: Callable[[str, str], None] | None = None,
) -> tuple[str, ...]:
    """Checks the folders, settings and devices of a command.

    Args:
      devices: every number of devices that jax may see, of all `slices` together.
      slices: number of TPU slices.
      processes: number of processes that are started.
      alone: what the user does to start a single process.
      check_folder: checks that the machines can use a folder; None if they have the
        files of this machine.

    Returns:
      The gin files that the command reads, with those that they include.
    """
    for flag in _REQUIRED.get(program.module, ()):
        if not program.values(flag):
            raise UserError(f"--{flag} of {program.module} is missing.")
    settings = _settings(program)
    frozen = any(isinstance(each.value, FrozenConfig) for each in settings)
    if processes > 1 and (frozen or program.module not in SHARED):
        training = "the training of heads, a refiner or a block drafter"
        name = training if frozen else program.module
        raise UserError(f"{name} runs as one process, not as {processes}: {alone}.")
    for name, folder in _folders(program, settings) if check_folder else ():
        check_folder(name, folder)
    for each, count in itertools.product(settings, devices):
        config = each.value
        if getattr(config, "mesh", None) is None:  # A refiner has one device.
            continue
        data, fsdp, _ = config.mesh.shape(count, slices)
        if not isinstance(config, TrainConfig):
            continue
        parts = config.compute.accumulate
        if config.batch_size % (data * fsdp * parts):
            raise UserError(
                f"TrainConfig.batch_size = {config.batch_size} is not a multiple of "
                f"data × fsdp × accumulate = {data} × {fsdp} × {parts}: change "
                "MeshConfig or ComputeConfig.accumulate."
            )
    files = dict.fromkeys(file for each in settings for file in each.files)
    return tuple(files) or program.values("gin_file")


def _settings(program: Program) -> list[Parsed[Any]]:
    """The settings of a command that has a mesh, one for each study."""
    given = program.values("gin_file"), program.values("gin_bindings")
    if program.module == TRAIN:
        kinds: Any = TrainConfig, HeadsTrainConfig, RefinerTrainConfig
        return [configuration.parse(*given, *kinds)]
    if program.module == STUDIES:
        size, _ = _results(program)
        names = catalog.choose(program.values(""), size)
        return [catalog.configure(name, size, *given) for name in names]
    if program.module in SHARED:
        return [configuration.parse(*given, DecodeConfig, defaults=GIN_DEFAULTS)]
    return []


def _results(program: Program) -> tuple[str, str]:
    """The size of studies and the folder of their results."""
    size = ("tiny", *program.values("size"))[-1]
    workdir = (None, *program.values("workdir"))[-1]
    return size, str(catalog.results_folder(workdir, size))


def _folders(
    program: Program, settings: Sequence[Parsed[Any]]
) -> Iterator[tuple[str, str]]:
    """What the machines must share, each with the name of its flag or setting."""
    for flag in _WRITTEN:
        yield from ((f"--{flag}", folder) for folder in program.values(flag))
    if program.module == STUDIES:
        yield "--workdir", _results(program)[1]
    if program.module in _BESIDE_MODEL and not program.values("output"):
        for model in program.values("model"):
            yield "--output", model if "/" in model else f"runs/{model}"
    read = [(f"--{flag}", value) for flag in _READ for value in program.values(flag)]
    for config in (each.value for each in settings):
        kind = type(config).__name__
        read += [(f"{kind}.{name}", getattr(config, name, None)) for name in _READ]
    named = ((x, KNOWN_RUNS.get(v, v)) for x, v in read if isinstance(v, str))
    yield from ((name, path) for name, path in named if not _travels(path))


def _travels(path: str) -> bool:
    """Whether a checkout elsewhere has it: a name, or a committed file."""
    if not re.search("[/.]", path):
        return True
    pure = pathlib.PurePath(path)
    inside = not pure.is_absolute() and ".." not in pure.parts
    return inside and bool(git("ls-files", "--", path))


def check_travels(gin_files: Collection[str]) -> None:
    """Checks that a checkout of HEAD elsewhere has the gin files."""
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
