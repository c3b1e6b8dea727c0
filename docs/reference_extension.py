"""The reference of the site: examples in docstrings as code, modules in order."""

import re
from typing import Any

import griffe

# From a prompt to the next blank line: the code and what it prints.
_EXAMPLE = re.compile(r"(?:^|(?<=\n))[ ]*>>> .*(?:\n(?!\s*\n).+)*")


class Reference(griffe.Extension):
    """What docstrings need to be read as pages."""

    def on_package(self, *, pkg: griffe.Module, **unused: Any) -> None:
        """Puts modules in order: as they are found, it is that of the disk."""
        del unused
        waiting = [pkg]
        while waiting:
            members = waiting.pop().members
            inner = {
                name: member
                for name, member in sorted(members.items())
                if isinstance(member, griffe.Module)
            }
            for name in inner:
                members[name] = members.pop(name)
            waiting += inner.values()

    def on_object(self, *, obj: griffe.Object, **unused: Any) -> None:
        """Puts fences around examples, which Markdown would take for quotations."""
        del unused
        if obj.docstring and ">>> " in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value
            )
