"""Commands of a launch, which are printed and, except in a dry run, executed."""

import dataclasses
import shlex
import subprocess
from collections.abc import Callable, Sequence

from bpd_jax.base import progress


@dataclasses.dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
      about: its purpose, for messages.
      words: the program and its arguments.
    """

    about: str
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command, quoted for a shell."""
        return shlex.join(self.words)

    def __str__(self) -> str:
        return f"# {self.about}\n{self.line}"


# Runs a command and returns its exit status.
Runner = Callable[[Command], int]


def run(command: Command) -> int:
    """Prints and runs a command, which inherits stdout and stderr."""
    progress.say(str(command))
    return subprocess.run(command.words, check=False).returncode


def train_words(
    python: str, gin_files: Sequence[str], bindings: Sequence[str], workdir: str
) -> tuple[str, ...]:
    """The command that trains.

    Args:
      python: path of the interpreter.
      gin_files: in order.
      bindings: statements such as `STEPS = 10`.
      workdir: folder of the run.
    """
    settings = [f"--gin_bindings={binding}" for binding in bindings]
    files = [f"--gin_file={file}" for file in gin_files]
    return (python, "-m", "bpd_jax.train", *files, *settings, f"--workdir={workdir}")
