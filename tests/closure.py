"""What importing a file drags in, and the frames from a command to attention.

    python -m tests.closure --model=smollm2

Prints the files and lines that four files import, at the top of modules, packages'
`__init__` included and empty files left out; and the frames of bpd_jax between `main`
of `bpd decode` and the attention of a pass over drafts, and the files that they are in.
`--root` is another checkout of the repository.
"""

import argparse
import ast
import functools
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent

# At most so many files and lines.
BUDGETS = {
    "bpd_jax/models/transformer.py": (20, 3_600),
    "bpd_jax/decoding/decode_loop.py": (34, 6_500),
    "bpd_jax/drafting/interface.py": (26, 4_500),
}
# At most so many frames in so many files.
MOST_FRAMES = 18, 11

# Runs a command and prints the frames of the deepest call of attention.
_PROGRAM = """
import os, runpy, sys, threading
found = []
def profile(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name.endswith("attention"):
        stack = []
        while frame is not None:
            path = os.path.relpath(frame.f_code.co_filename, os.getcwd())
            if path.startswith("bpd_jax" + os.sep):
                stack.append(f"{path} {frame.f_code.co_name}")
            frame = frame.f_back
        names = [line.split(" ")[1] for line in stack]
        if "main" in names and any("verif" in line for line in stack):
            stack = stack[: names.index("main") + 1]
            if len(stack) > len(found):
                found[:] = stack
threading.setprofile(profile)
sys.setprofile(profile)
try:
    runpy.run_module("bpd_jax.decode", run_name="__main__", alter_sys=True)
except SystemExit:
    pass
finally:
    sys.setprofile(None)
    print("\\n".join(["FRAMES", *reversed(found)]))
"""


def module_file(name: str, root: pathlib.Path) -> pathlib.Path | None:
    """The file of a module or package of the repository."""
    path = root / name.replace(".", "/")
    files = path.with_name(f"{path.name}.py"), path / "__init__.py"
    return next((file for file in files if file.exists()), None)


@functools.cache
def imported_files(file: pathlib.Path, root: pathlib.Path) -> frozenset[pathlib.Path]:
    """The files of bpd_jax that a file imports at its top, with those of packages."""

    def names(body: Sequence[ast.stmt]) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If | ast.Try):
                handlers = [part.body for part in getattr(node, "handlers", [])]
                for part in (node.body, node.orelse, *handlers):
                    yield from names(part)

    found = set()
    for name in names(ast.parse(file.read_text(encoding="utf-8")).body):
        parts = name.split(".")
        if parts[0] == "bpd_jax":
            prefixes = (".".join(parts[: i + 1]) for i in range(len(parts)))
            found.update(module_file(prefix, root) for prefix in prefixes)
    return frozenset(path for path in found if path is not None)


def closure(file: str, root: pathlib.Path = ROOT) -> dict[pathlib.Path, int]:
    """Lines of all files that importing a file imports, itself included."""
    seen: set[pathlib.Path] = set()
    todo = [root / file]
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += imported_files(path, root)
    texts = {path: path.read_text(encoding="utf-8") for path in seen}
    return {path: len(text.splitlines()) for path, text in texts.items() if text}


def frames(model: str, root: pathlib.Path = ROOT) -> list[str]:
    """Files and functions from `main` of `bpd decode` to attention, outermost first."""
    flags = [f"--model={model}", "--prompt=a", "--max_new_tokens=4", "--method=heads"]
    program = [sys.executable, "-c", _PROGRAM, *flags]
    # Without kept programs, which run without being traced.
    kept = {**os.environ, "JAX_COMPILATION_CACHE_DIR": ""}
    options: Any = {"cwd": root, "env": kept, "capture_output": True, "text": True}
    result = subprocess.run(program, check=True, **options)
    return result.stdout.partition("FRAMES\n")[2].splitlines()


def main() -> None:
    """Prints closures and frames."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("--model", help="a model with block heads, or its folder")
    arguments = parser.parse_args()
    for file, (most_files, most_lines) in BUDGETS.items():
        found = closure(file, arguments.root)
        print(
            f"{file}: {len(found)} files, {sum(found.values()):,} lines "
            f"(at most {most_files} and {most_lines:,})"
        )
    if arguments.model:
        stack = frames(arguments.model, arguments.root)
        files = len({line.split(" ")[0] for line in stack})
        print(f"main to attention: {len(stack)} frames in {files} files")
        print(*(f"    {line}" for line in stack), sep="\n")


if __name__ == "__main__":
    main()
