"""Draws docs/images/chat.svg: `bpd chat` in a terminal, as it was.

    python scripts/chat_picture.py

It runs the command in a pseudo-terminal, types the lines below, and draws what is on
the screen in the end.
"""

import os
import pathlib
import pty
import select
import sys
import time

from rich.console import Console
from rich.text import Text

LINES = [
    "How many minutes are in three and a half days? Think step by step.",
    "/plain",
    "How many minutes are in three and a half days? Think step by step.",
]
COMMAND = ["-m", "bpd_jax.chat", "--model=smollm2", "--max_new_tokens=96"]
WIDTH, SECONDS = 96, 180
ROOT = pathlib.Path(__file__).parent.parent


def screen(lines: list[str]) -> str:
    """What the command writes to a terminal while these lines are typed."""
    child, terminal = pty.fork()
    if child == 0:
        environment = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
        os.execve(sys.executable, [sys.executable, *COMMAND], environment)
    written, typed, end = b"", 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        ready, _, _ = select.select([terminal], [], [], 1)
        if ready:
            try:
                written += os.read(terminal, 4096)
            except OSError:  # The command has ended.
                break
        elif written.endswith(b"> "):  # It waits for the next line.
            line = lines[typed] if typed < len(lines) else "/quit"
            typed += 1
            os.write(terminal, f"{line}\n".encode())
    os.waitpid(child, 0)
    return written.decode("utf-8", "replace").replace("\r\n", "\n")


def shown(text: str) -> str:
    """The conversation, from the first prompt on, without lines that were erased."""
    rows = text[text.index("> ") :].split("\n")
    kept = [row.rpartition("\r")[2] for row in rows if "compiling" not in row]
    return "\n".join(kept).replace("\x1b[2K", "").removesuffix("> /quit\n").rstrip()


def main() -> None:
    """Runs the command and writes the picture."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi(shown(screen(LINES))))
    target = ROOT / "docs" / "images" / "chat.svg"
    console.save_svg(str(target), title="bpd chat --model=smollm2")
    print(target)


if __name__ == "__main__":
    main()
