"""Ctrl-C; closed, full or unread streams; encodings that lack characters."""

import contextlib
import io
import os
import pathlib
import pty
import signal
import subprocess
import sys
import time

import pytest

from bpd_jax.base import cli, startup
from bpd_jax.base.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent.parent

# Imports the package as `python -m bpd_jax.NAME` does, then runs BODY.
_PROGRAM = """
import os, signal, sys
sys.argv[:1] = ["-m"]
sys.orig_argv = ["python", "-m", "bpd_jax.evaluate"]
import bpd_jax
from bpd_jax.base import startup
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
"""


def _program(body: str, *, closed: bool = False) -> tuple[int, str, str]:
    """Exit status, output and errors; standard input and output may be closed."""
    command = [sys.executable, "-c", _PROGRAM + body]
    if closed:
        # By a shell: code between fork and exec is unsafe in a process with threads.
        command = ["sh", "-c", 'exec "$0" "$@" <&- >&-', *command]
    done = subprocess.run(
        command, cwd=ROOT, timeout=120, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def _fail_by_user() -> None:
    raise UserError("A consequence of the interrupt.")


def test_an_interrupt_while_libraries_are_imported_is_not_swallowed():
    """Even if a library catches everything and file descriptor 2 goes elsewhere."""
    result = _program(
        "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"
        "try:\n    interrupt()\nexcept:\n    pass\nprint('went on')\n"
    )
    assert result == (130, "", "interrupted\n")


def test_command_that_ignores_an_interrupt_is_terminated():
    result = _program(
        "import time\n"
        "startup._GRACE_SECONDS = 0.1\n"
        "with startup.interruptible():\n"
        "    try:\n        interrupt()\n    except:\n        time.sleep(100)\n"
    )
    assert result == (130, "", "interrupted\n")


@pytest.mark.parametrize("end", [lambda: None, sys.exit, _fail_by_user])
def test_an_interrupt_that_a_library_swallows_still_ends_the_command(
    end, capsys, monkeypatch
):
    """Also if the command then ends by itself: absl ends every one by SystemExit."""
    # Otherwise a pause of this process would end it, and with it all tests.
    monkeypatch.setattr(startup, "_GRACE_SECONDS", 600)
    before = signal.getsignal(signal.SIGINT)
    cleaned = []

    def swallow() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except BaseException:
            cleaned.append(True)

    with pytest.raises(SystemExit) as exit_info, cli.exit_on_errors():  # noqa: PT012
        swallow()
        end()
    assert exit_info.value.code == 130
    assert cleaned
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "arguments, original, expected",
    [
        (["-m"], ["python", "-m", "bpd_jax.train"], True),
        (["-m"], ["python", "-X", "dev", "-m", "bpd_jax"], True),
        (["/bin/bpd", "train"], ["python", "/bin/bpd", "train"], True),
        (["-m"], ["python", "-m", "experiments.run"], True),
        (["-m"], ["python", "-m", "other.module"], False),
        (["script.py"], ["python", "script.py", "-m", "bpd_jax"], False),
        ([""], ["python"], False),
    ],
)
def test_only_programs_of_the_package_change_signals(
    arguments, original, expected, monkeypatch
):
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert startup.is_program() == expected


def test_descriptors_of_closed_streams_are_not_reused():
    result = _program(
        "print('lost')\n"
        "os._exit(os.open(os.devnull, os.O_RDONLY) > 2 and sys.stdin.read() == '')",
        closed=True,
    )
    assert result == (1, "", "")


def _status_of_printing(
    stream: io.TextIOWrapper, text: str, monkeypatch
) -> int | str | None:
    """The exit status of a command that prints to a stream."""
    monkeypatch.setattr(sys, "stdout", stream)
    try:
        with cli.exit_on_errors():
            print(text)
    except SystemExit as exit_error:
        return exit_error.code
    finally:
        monkeypatch.undo()
        with contextlib.closing(stream):
            stream.flush()  # As Python does at exit.
    return 0


@pytest.mark.parametrize("text", ["short", "long" * 100_000])
def test_closed_pipe_ends_the_command_silently(text, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    assert _status_of_printing(stream, text, monkeypatch) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["short", "long" * 100_000])
def test_full_device_is_reported(text, monkeypatch, capsys):
    stream = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    assert _status_of_printing(stream, text, monkeypatch) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot write")
    assert error.count("\n") == 1


def test_other_broken_pipes_are_not_hidden():
    with pytest.raises(BrokenPipeError), cli.exit_on_errors():
        raise BrokenPipeError


def test_a_terminal_shows_control_characters_of_messages():
    ours, theirs = pty.openpty()
    program = (
        "import sys\n"
        "from bpd_jax.base import cli, startup\n"
        "from bpd_jax.base.errors import UserError, warn\n"
        "with cli.exit_on_errors():\n"
        "    print('tensor \\x1b]52;c;\\x07', 'a\\tb')\n"
        "    warn('\\x9b2J')\n"
        "    startup.unguarded(sys.stdout).write('\\x1b[A')\n"
        "    raise UserError('name \\x1b[2J')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # The terminal is closed.
            while part := os.read(ours, 1 << 16):
                said += part
    os.close(ours)
    assert process.returncode == 1
    for shown in (rb"tensor \x1b]52;c;\x07 a", rb"\x9b2J", rb"error: name \x1b[2J"):
        assert shown in said
    assert b"\x1b]52" not in said
    assert b"\x1b[2J" not in said
    assert b"\x1b[A" in said  # As a progress bar, which moves the cursor.


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_text_beyond_the_encoding_is_escaped(encoding, tmp_path, monkeypatch):
    path = tmp_path / "out"
    stream = path.open("w", encoding=encoding)
    assert _status_of_printing(stream, "é→\udc80.", monkeypatch) == 0
    text = path.read_bytes().decode(encoding).rstrip()
    assert text.encode().decode("unicode_escape").endswith(".")
    assert text.isascii() == (encoding == "ascii")
