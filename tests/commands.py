"""Runs entry points as a user does, without importing every library each time.

A server process imports the libraries once; every call forks from it, imports the
command and runs it there. What must be tested with a new interpreter uses `python`.
"""

import atexit
import contextlib
import gc
import importlib
import inspect
import io
import multiprocessing
import os
import pathlib
import runpy
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent

# See conftest.py. The server imports this file first, so that it holds for all.
gc.set_threshold(50_000, 20, 50)

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        "tests.commands",
        "flax.linen",
        "gin",
        "jinja2",
        "numba",
        "optax",
        "orbax.checkpoint",
        "rich.console",
        "scipy.stats",
        "seqio",
        "tokenizers",
        # Modules that define no flags: a command must have only its own.
        "bpd_jax.api",
        "bpd_jax.training.trainer",
    ]
)


class Done(NamedTuple):
    """Exit status and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def start(
    module: str, *commands: list[str], folder: str | os.PathLike[str] = ROOT
) -> list[Done]:
    """Runs an entry point with each list of arguments, in one process, in a folder."""
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(
        target=_run,
        args=(sender, module, commands, os.fspath(folder), dict(os.environ)),
    )
    process.start()
    sender.close()
    try:
        results = receiver.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"{module} ended with {process.exitcode}") from None
    process.join()
    assert isinstance(results, list), results
    return [Done(*result) for result in results]


def call(module: str, *arguments: str, folder: str | os.PathLike[str] = ROOT) -> Done:
    """Runs an entry point with these arguments, in a folder."""
    [result] = start(module, list(arguments), folder=folder)
    return result


def succeed_all(
    module: str, *commands: list[str], folder: str | os.PathLike[str] = ROOT
) -> list[Done]:
    """Runs an entry point as `start`, where it must succeed each time."""
    results = start(module, *commands, folder=folder)
    for result in results:
        assert result.returncode == 0, result.stderr
    return results


def succeed(
    module: str, *arguments: str, folder: str | os.PathLike[str] = ROOT
) -> Done:
    """Runs an entry point with these arguments, in a folder, where it must succeed."""
    [result] = succeed_all(module, list(arguments), folder=folder)
    return result


def assert_refused(
    result: Done | subprocess.CompletedProcess[str], message: str
) -> None:
    """Checks that a command ended with one sentence, which contains `message`."""
    errors = [line for line in result.stderr.splitlines() if "error: " in line]
    assert result.returncode == 1, result
    assert "Traceback" not in result.stderr, result.stderr
    assert len(errors) == 1, result.stderr
    assert message in errors[0]


def assert_all_refused(
    module: str,
    cases: Iterable[tuple[list[str], str]],
    folder: str | os.PathLike[str] = ROOT,
) -> None:
    """Checks that an entry point refuses each list of arguments with its message."""
    cases = list(cases)
    results = start(module, *(arguments for arguments, _ in cases), folder=folder)
    for result, (_, message) in zip(results, cases, strict=True):
        assert_refused(result, message)


def wait_for(condition: Callable[[], object]) -> None:
    """Waits for a condition, 30 seconds at most."""
    for _ in range(1500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("nothing happened")


def commit_all(folder: pathlib.Path) -> None:
    """Makes a folder a git repository with one commit of all its files."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *arguments], check=True)


def free_port() -> int:
    """A port of this host that is free, and that no outgoing connection is given."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def python(
    *arguments: str, folder: str | os.PathLike[str] = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a new interpreter in a folder, with the repository on its path."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


class Script:
    """A Python file that runs in a process of its own, with these arguments.

    Args:
      path: the file; it runs as `__main__`.
      arguments: what follows its name in `sys.argv`.
      folder: receives what it prints.
      environment: variables that differ from this process's.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *arguments: str,
        folder: pathlib.Path,
        environment: dict[str, str],
    ) -> None:
        self._files = [folder / f"{id(self)}.{name}" for name in ("out", "err")]
        variables = {**os.environ, **environment}
        self._process = _PROCESSES.Process(
            target=_run_script,
            args=([os.fspath(path), *arguments], *self._files, variables),
        )
        self._process.start()

    def wait(self, timeout: float) -> Done:
        """Waits for it to end; kills it after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        out, err = (
            path.read_text(encoding="utf-8") if path.is_file() else ""
            for path in self._files
        )
        status = self._process.exitcode
        assert status is not None
        return Done(status, out, err)


def on_two(
    path: pathlib.Path,
    arguments: Callable[[str, int], Iterable[str]],
    folder: pathlib.Path,
) -> list[Done]:
    """Runs a file in two processes of four devices.

    Args:
      path: the file.
      arguments: its arguments, for the coordinator's address and the process's index.
      folder: receives what they print.
    """
    address = f"127.0.0.1:{free_port()}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    children = [
        Script(
            path,
            *arguments(address, index),
            folder=folder,
            environment={"XLA_FLAGS": flags},
        )
        for index in range(2)
    ]
    return [child.wait(timeout=300) for child in children]


def _run_script(
    arguments: list[str],
    out: pathlib.Path,
    err: pathlib.Path,
    environment: dict[str, str],
) -> None:
    for name, path, descriptor in (("stdout", out, 1), ("stderr", err, 2)):
        with path.open("wb") as stream:
            os.dup2(stream.fileno(), descriptor)
        # The stream of the server may be of another kind, with a position for example.
        options = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace"}
        setattr(sys, name, open(descriptor, "w", closefd=False, **options))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    status: object = 1
    try:
        runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    # As the interpreter does at its end, unlike processes of `multiprocessing`. Among
    # the functions, that of jax waits for all processes of a run: a process that
    # outlives the coordinator in process 0 aborts.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.exit(status)


def _run(
    sender: Any,
    module: str,
    commands: tuple[list[str], ...],
    folder: str,
    environment: dict[str, str],
) -> None:
    """Runs in the new process; sends the results of the commands, or a traceback."""
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sender.send(_results(module, commands))
    except BaseException:
        sender.send(traceback.format_exc())


def _results(
    module: str, commands: tuple[list[str], ...]
) -> list[tuple[int, str, str]]:
    from absl import flags

    from bpd_jax.base import cli

    main = importlib.import_module(module).main
    positional = bool(inspect.signature(main).parameters)
    results = []
    for arguments in commands:
        for name in flags.FLAGS:
            flags.FLAGS[name].unparse()
        sys.argv = ["command", *arguments]
        out, err, status = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.run(main, positional=positional)
            except SystemExit as exit_error:
                status = exit_error.code or 0
            except Exception:
                status = 1
                traceback.print_exc()
        results.append((status, out.getvalue(), err.getvalue()))
    return results
