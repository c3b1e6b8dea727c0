"""What the site has besides pages: flags of commands, and files of the checkout.

Pages link to files of the repository, which lie outside docs/. The site shows such a
file as a page of its own, so that it can be read where the repository is not at hand.
`flags_of` reads a command's flags from its source; the tests of the site use it too.
"""

import ast
import functools
import os
import pathlib
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMANDS_PAGE = "reference/commands.md"
_PACKAGES = ("bpd_jax", "experiments", "benchmarks")

# Commands in the order of the README, then those of experiments/.
COMMANDS = (
    "bpd_jax.train",
    "bpd_jax.prepare",
    "bpd_jax.compile",
    "bpd_jax.distill",
    "bpd_jax.build_ngram",
    "bpd_jax.count_ngrams",
    "bpd_jax.chat",
    "bpd_jax.decode",
    "bpd_jax.evaluate",
    "bpd_jax.tune",
    "bpd_jax.report",
    "bpd_jax.export",
    "bpd_jax.import_heads",
    "bpd_jax.export_params",
    "experiments.run",
    "experiments.verdicts",
    "experiments.finetune.run",
    "experiments.sweeps.run",
    "experiments.launch.tpu",
    "experiments.launch.slurm",
)

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")
_LANGUAGES = {".py": "python", ".json": "json", ".sh": "bash", ".md": "markdown"}
_SHOWN = {".py", ".gin", ".json", ".sh", ".txt", ".md", ".yml", ".csv", ".tex"}
# Longer files are cut: the site is for reading.
_LONGEST = 60_000


class Flag(NamedTuple):
    """A flag of a command."""

    name: str
    help: str
    is_bool: bool


def module_file(module: str) -> pathlib.Path:
    """Where `python -m module` finds its code."""
    return ROOT / (module.replace(".", "/") + ".py")


def flags_of(module: str) -> list[Flag]:
    """The flags of a command: its own, and those of all that it imports.

    Modules are read, not imported, so that neither jax nor absl is needed.
    """
    found: dict[str, Flag] = {}
    waiting, seen = [module], {module}
    while waiting:
        flags, imports = _read(waiting.pop(0))
        for flag in flags:
            found.setdefault(flag.name, flag)
        new = [name for name in imports if name not in seen]
        seen.update(new)
        waiting += dict.fromkeys(new)
    return list(found.values())


@functools.cache
def _read(module: str) -> tuple[list[Flag], list[str]]:
    """The flags that a module defines, and the modules that it imports at once."""
    tree = ast.parse(module_file(module).read_text())
    flags = [flag for node in ast.walk(tree) if (flag := _flag(node))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cli.define_flags":
            flags += _flags_of_settings(tree, node)
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    ours = [name for name in names if name.partition(".")[0] in _PACKAGES]
    return flags, [name for name in ours if module_file(name).is_file()]


def _flags_of_settings(tree: ast.Module, call: ast.Call) -> list[Flag]:
    """The flags that a module makes of a dataclass with `cli.define_flags`."""
    kind, *named = call.args
    name = ast.unparse(kind)
    [module] = [
        node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and name in [a.name for a in node.names]
    ]
    wanted = [word.value for word in named if isinstance(word, ast.Constant)]
    fields = _settings_of(module or "", name)
    return [
        Flag(field, about, is_bool)
        for field, (about, is_bool) in fields.items()
        if not wanted or field in wanted
    ]


def _settings_of(module: str, name: str) -> dict[str, tuple[str, bool]]:
    """Help of every field of a dataclass, its bases included; whether it is a bool."""
    # The site is built without an installed bpd_jax; this module needs no libraries.
    sys.path.append(str(ROOT))
    from bpd_jax.base.settings import documented_attributes

    classes = {
        node.name: node
        for node in ast.parse(module_file(module).read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    if name not in classes:
        return {}
    found: dict[str, tuple[str, bool]] = {}
    for base in classes[name].bases:
        found |= _settings_of(module, ast.unparse(base))
    about = documented_attributes(ast.get_docstring(classes[name], clean=False) or "")
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = ast.unparse(node.annotation)
            if not kind.startswith("ClassVar"):
                found[node.target.id] = about[node.target.id], kind == "bool"
    return found


def _flag(node: ast.AST) -> Flag | None:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    kind = node.func.attr
    if not kind.startswith("DEFINE_"):
        return None
    name = node.args[0]
    if not isinstance(name, ast.Constant):
        return None  # of `define_flags` itself
    place = 3 if kind == "DEFINE_enum" else 2
    return Flag(name.value, _text(node.args[place]), kind == "DEFINE_bool")


def _text(node: ast.AST) -> str:
    """The text of a help string; what only running it tells is left as its source."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return f"`{ast.unparse(node)}`"


def commands_page() -> str:
    """Every command with its docstring and its flags."""
    parts = [
        "# Commands\n",
        "Each is `python -m NAME`; `--help` says the same in the terminal. Commands "
        "that take `--gin_file` also take `--gin.NAME=VALUE` for any value.\n",
    ]
    for command in COMMANDS:
        if not module_file(command).is_file():
            continue
        doc = ast.get_docstring(ast.parse(module_file(command).read_text())) or ""
        parts.append(f"## {command}\n\n{_as_markdown(doc)}\n")
        parts.append("| flag | |\n|---|---|")
        parts += [
            f"| `--{flag.name}` | {_cell(flag.help)} |" for flag in flags_of(command)
        ]
        parts.append("")
    return "\n".join(parts)


def _as_markdown(doc: str) -> str:
    """A docstring, whose indented examples are shell commands."""
    return re.sub(
        r"(?m)^(?: {4}.*\n?)(?:(?: {4}.*)?\n?(?= {4}))*(?: {4}.*\n?)*",
        lambda block: (
            "```bash\n" + re.sub(r"(?m)^ {4}", "", block[0]).rstrip() + "\n```\n"
        ),
        doc,
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds the page of commands, and a page for every file that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    files.append(File.generated(config, COMMANDS_PAGE, content=commands_page()))
    targets = set()
    for file in files.documentation_pages():
        if file.src_uri != COMMANDS_PAGE:
            text = pathlib.Path(config.docs_dir, file.src_uri).read_text()
            for link in _LINK.finditer(text):
                target = _target(file.src_uri, link[2])
                if target is not None:
                    targets.add(target)
    for target in sorted(targets):
        for path, content in _source_pages(target):
            made = File.generated(config, path, content=content)
            made.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(made)
    return files


def _target(page: str, link: str) -> str | None:
    """The file or folder of the repository that a page links to, or None."""
    path = os.path.normpath(os.path.join("docs", os.path.dirname(page), link))
    inside = path == "docs" or path.startswith("docs/")
    return None if inside or path.startswith("..") else path


def _source_pages(target: str) -> list[tuple[str, str]]:
    """Pages for a file, or for a folder and the files in it."""
    path = ROOT / target
    if path.is_file():
        return [(f"source/{target}.md", _source_page(target))]
    names = sorted(p.name for p in path.iterdir() if p.suffix in _SHOWN)
    lines = [f"# {target}/", "", *(f"- [{name}]({name}.md)" for name in names)]
    listing = (f"source/{target}/index.md", "\n".join(lines) + "\n")
    pages = [
        (f"source/{target}/{name}.md", _source_page(f"{target}/{name}"))
        for name in names
    ]
    return [listing, *pages]


def _source_page(target: str) -> str:
    text = (ROOT / target).read_text(errors="replace")
    cut = ""
    if len(text) > _LONGEST:
        text, cut = text[:_LONGEST], "\n*(The rest is in the repository.)*\n"
    language = _LANGUAGES.get(pathlib.Path(target).suffix, "text")
    name = pathlib.Path(target).name
    return f"# {name}\n\n`{target}`\n\n`````{language}\n{text}\n`````\n{cut}"


# Material asks a network for this; without it a page opened as a file has no search.
_SHIM = "https://unpkg.com/iframe-worker/shim"


def on_post_page(output: str, page: "Page", **unused: Any) -> str:
    """Puts our own script in the place of the one that comes from a network."""
    del unused
    to_root = "../" * page.url.count("/")
    return output.replace(_SHIM, f"{to_root}assets/file_worker.js")


def on_post_template(output_content: str, template_name: str, **unused: Any) -> str:
    """The same in pages without a source, which have no place of their own."""
    del template_name, unused
    return output_content.replace(_SHIM, "/assets/file_worker.js")


def on_page_markdown(markdown: str, page: "Page", **unused: Any) -> str:
    """Turns links to files of the repository into links to their pages."""
    del unused
    source = page.file.src_uri
    if source.startswith("source/"):
        return markdown

    def replace(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        if target is None:
            return link[0]
        is_file = (ROOT / target).is_file()
        shown = f"source/{target}.md" if is_file else f"source/{target}/index.md"
        return f"[{link[1]}]({os.path.relpath(shown, os.path.dirname(source) or '.')})"

    return _LINK.sub(replace, markdown)
