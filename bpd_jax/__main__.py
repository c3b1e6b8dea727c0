"""The command `bpd`: `bpd decode --model=smollm2` is `python -m bpd_jax.decode …`.

bpd                   # lists the commands
bpd help decode       # lists the flags of one, as bpd decode --help
"""

import ast
import difflib
import importlib.resources
import pkgutil
import runpy
import sys
from collections.abc import Iterator

import bpd_jax
from bpd_jax.base import cli
from bpd_jax.base.errors import UserError


def main() -> None:
    """Runs the command named by the first argument, or lists all commands."""
    name, *arguments = sys.argv[1:] or ["help"]
    if name == "help" and arguments:  # `bpd help decode`
        name, *arguments = arguments[0], "--help"
    name = name.replace("-", "_") if not name.startswith("-") else name
    if name in (found := dict(commands())):
        sys.argv[1:] = arguments
        runpy.run_module(f"bpd_jax.{name}", run_name="__main__", alter_sys=True)
        return
    with cli.exit_on_errors():
        if name in ("help", "-h", "--help"):
            print(
                f"bpd_jax {bpd_jax.__version__}: blockwise parallel decoding in JAX.\n"
            )
            print("usage: bpd COMMAND [--flag=value …]\n")
            width = max(map(len, found))
            for command, about in found.items():
                print(f"  {command:<{width}}  {about}")
            print("\nbpd COMMAND --help lists the flags of a command.")
        elif name in ("--version", "version"):
            print(f"bpd_jax {bpd_jax.__version__}")
        else:
            close = difflib.get_close_matches(name, found, n=1)
            hint = f"did you mean {close[0]}" if close else "bpd help lists all"
            raise UserError(f"bpd has no command {name!r}: {hint}.")


def commands() -> Iterator[tuple[str, str]]:
    """Name and first line of every command; imports none of them."""
    for module in pkgutil.iter_modules(bpd_jax.__path__):
        if module.ispkg or module.name == "__main__":
            continue
        file = importlib.resources.files(bpd_jax) / f"{module.name}.py"
        source = file.read_text(encoding="utf-8")
        if '\nif __name__ == "__main__":\n' in source:
            about = ast.get_docstring(ast.parse(source)) or ""
            yield module.name, about.partition("\n")[0]


if __name__ == "__main__":
    main()
