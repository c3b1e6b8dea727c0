"""Links between the pages of docs/ resolve, names on them exist, and runs parse.

Pages are read as text, so that these tests do not need mkdocs; the last test builds the
site if mkdocs is installed.
"""

import functools
import importlib.util
import inspect
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from bpd_jax.base.configuration import parse
from bpd_jax.base.settings import registered
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.studies.study_config import StudyConfig
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.refiner_sources import RefinerTrainConfig
from experiments.catalog import STUDIES
from tests.commands import succeed, succeed_all
from tests.experiments.configurations import gin_arguments

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
# Commands with a parser of their own.
OWN_PARSER = {"bpd_jax.lm_eval", "pytest", "pip", "venv"}
GIN_FILES = [*ROOT.glob("gin_configs/**/*.gin"), *ROOT.glob("experiments/**/*.gin")]


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = _load("hooks")
# Imported, so that they and what they refer to are registered.
assert {TrainConfig, HeadsTrainConfig, StudyConfig} <= {*registered.values()}


def name_of(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def in_nav(entries: Any) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else in_nav(value)


def prose(text: str) -> str:
    """Without code blocks and comments."""
    text = re.sub(r"^(`{3,})[^\n]*\n.*?^\1[^\n]*$", "", text, flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def shell_blocks(text: str) -> list[str]:
    """The code blocks that may hold commands."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.M | re.S)
    return [code for language, code in blocks if language in ("", "bash", "text")]


def anchors(page: pathlib.Path) -> set[str]:
    """The ids of headings, as the site has them."""
    ids: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page.read_text()), re.M):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        anchor = title.encode("ascii", "ignore").decode()
        anchor = re.sub(r"[^\w\s-]", "", anchor).strip().lower()
        ids.add(re.sub(r"[-\s]+", "-", anchor))
    return ids


def test_every_page_is_in_the_nav_once() -> None:
    listed = list(in_nav(SITE["nav"]))
    pages = [str(page.relative_to(DOCS)) for page in PAGES]
    assert sorted(listed) == sorted([*pages, HOOKS.COMMANDS_PAGE])


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_and_anchors_resolve(page: pathlib.Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target == DOCS / HOOKS.COMMANDS_PAGE:  # made when the site is built
            continue
        # Results of studies are committed after they have been measured.
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@functools.cache
def flags_of(module: str) -> dict[str, bool]:
    return {flag.name: flag.is_bool for flag in HOOKS.flags_of(module)}


def commands(code: str) -> list[list[str]]:
    """Every `python -m …` of a block or of inline code, as arguments."""
    command_lines = []
    for line in code.replace("\\\n", " ").splitlines():
        _, marker, rest = line.partition("python -m ")
        if marker:
            # `…` stands for anything, and so does a Unicode dash.
            rest = rest.replace("…", "").partition(" #")[0].partition(" > ")[0]
            command_lines.append(shlex.split(rest.replace("$'\\n\\n'", "STOP")))
    return [words for words in command_lines if words]


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`]*python -m [^`]*)`", prose(text))


COMMANDS = [
    pytest.param(page, words, id=f"{name_of(page)}: {' '.join(words)[:90]}")
    for page in TEXTS
    for text in [page.read_text()]
    for code in [*shell_blocks(text), *inline_code(text)]
    for words in commands(code)
    if re.fullmatch(r"(bpd_jax|experiments|benchmarks)\..*", words[0])
]
# Those in code blocks are complete, so that they can be run dry.
BLOCKS = [code for page in TEXTS for code in shell_blocks(page.read_text())]
WHOLE = [words for code in BLOCKS for words in commands(code)]
RUNS = dict.fromkeys(tuple(words) for words in WHOLE if words[0] == "bpd_jax.train")
LAUNCHERS = [f"experiments.{x}" for x in ("launch.slurm", "launch.tpu", "sweeps.run")]


@pytest.mark.parametrize("page, words", COMMANDS)
def test_commands_exist_with_their_flags(page: pathlib.Path, words: list[str]) -> None:
    module, *arguments = words
    assert HOOKS.module_file(module).is_file(), module
    if module in OWN_PARSER:
        return
    if "--" in arguments:  # A launcher, and the command or arguments that it passes on.
        begin = arguments.index("--")
        arguments, passed = arguments[:begin], arguments[begin + 1 :]
        if passed and not passed[0].startswith("-"):
            prefix = "" if "." in passed[0] else "bpd_jax."
            test_commands_exist_with_their_flags(
                page, [prefix + passed[0], *passed[1:]]
            )
    for word in arguments:
        if not word.startswith("--"):
            continue
        flag, _, value = word[2:].partition("=")
        if flag.startswith("gin."):
            check_gin_name(flag[4:])
            continue
        known = flags_of(module)
        negated = flag.startswith("no") and known.get(flag[2:], False)
        # `cli` defines these for every command.
        assert flag in known or negated or flag == "help", flag
        if flag == "gin_file" and not re.search(r"NAME|FILE", value):
            task_of_page = f'title="{value}"' in page.read_text()
            assert (ROOT / value).is_file() or task_of_page, value
        if flag in ("method", "methods"):
            check_methods(value, page)


def check_methods(value: str, page: pathlib.Path) -> None:
    if value == "help" or "$" in value or "…" in value:
        return
    for name in value.split(","):
        # The tutorial that adds a method may use it.
        added = f'name = "{name.partition(":")[0]}"' in page.read_text()
        assert added or isinstance(parse_method(name), Method)


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_runs_resolve(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if "--dry_run" in words:
        result = succeed(*words)
        assert "tokens per step: " in result.stdout
        return
    files, bindings = gin_arguments(words[1:])
    assert len(files) + len(bindings) + 1 == len(words[1:])
    if any("runs/finetune/" in text or "gsm8k" in text for text in (*files, *bindings)):
        return  # Made by an earlier command, or by the tutorial itself.
    kinds = TrainConfig, HeadsTrainConfig, RefinerTrainConfig
    assert isinstance(parse(files, bindings, *kinds).value, kinds)


@pytest.mark.parametrize("module", LAUNCHERS)
@pytest.mark.usefixtures("storage")
def test_launches_and_sweeps_pass_dry_run(module: str) -> None:
    launches = [
        ["--dry_run", *(x.replace("gs://BUCKET", "gs://bpd-test") for x in words[1:])]
        for words in WHOLE
        if words[0] == module
    ]
    assert launches
    succeed_all(module, *launches)


@functools.cache
def macros() -> set[str]:
    text = "\n".join(path.read_text() for path in GIN_FILES)
    return set(re.findall(r"^([A-Z][A-Z_]*) =", text, re.M))


def check_gin_name(name: str) -> None:
    owner, dot, parameter = name.partition(".")
    if not dot:
        assert owner in macros() or owner == "NAME", name
    else:
        assert parameter in inspect.signature(registered[owner]).parameters, name


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_files_and_targets_that_are_named_exist(page: pathlib.Path) -> None:
    text = page.read_text()
    targets = set(
        re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    )
    code = re.findall(r"`([^`\n]+)`", prose(text))
    code += shell_blocks(text)
    for block in code:
        for target in re.findall(r"^(?:\$ )?make ([a-z-]+)", block, re.M):
            assert target in targets, target
        for path in re.findall(
            r"(?<![\w/{-])(?:gin_configs|experiments|benchmarks)/[\w/.]+\.\w+", block
        ):
            made_here = f'title="{path}"' in text
            assert (ROOT / path).is_file() or made_here, path


def test_reproduction_page_names_every_study() -> None:
    text = (DOCS / "reproduction.md").read_text()
    section = text.partition("<!-- findings")[2].partition("<!-- end of findings")[0]
    assert sorted(re.findall(r"^- \*\*(\w+)\*\* \(\[\w", section, re.M)) == sorted(
        STUDIES
    )
    assert "see the results" not in section


def test_every_package_is_in_the_reference() -> None:
    documented = {
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: bpd_jax\.(\w+)$", page.read_text(), re.M)
    }
    packages = {path.parent.name for path in (ROOT / "bpd_jax").glob("*/__init__.py")}
    assert packages <= documented
    for name in documented - packages:
        assert (ROOT / "bpd_jax" / f"{name}.py").is_file()


def test_every_command_is_in_the_reference() -> None:
    entry_points = {
        f"bpd_jax.{path.stem}"
        for path in (ROOT / "bpd_jax").glob("*.py")
        if "cli.run(" in path.read_text() and path.stem != "cli"
    }
    assert entry_points <= set(HOOKS.COMMANDS)
    page = HOOKS.commands_page()
    assert "| `--prompts_file` | " in page.partition("## bpd_jax.decode")[2]
    # Flags of a command, shared ones and those of settings.
    tune = flags_of("bpd_jax.tune")
    assert {"seconds", "model", "max_new_tokens", "gin_file"} <= set(tune)
    assert "workdir" not in tune
    assert flags_of("bpd_jax.train")["dry_run"]


def test_the_site_builds(tmp_path: pathlib.Path) -> None:
    docs_python = ROOT / ".venv-docs" / "bin" / "python"
    python = str(docs_python) if docs_python.is_file() else sys.executable
    if python == sys.executable and importlib.util.find_spec("mkdocs") is None:
        pytest.skip("what builds the site is not installed: make docs installs it")
    result = subprocess.run(
        [python, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    built = tmp_path / "site"
    reference_page = (built / "reference" / "drafting.html").read_text()
    assert 'id="bpd_jax.drafting.draft_tree.DraftTree"' in reference_page
    for page in built.rglob("*.html"):
        assert not re.search(r'<(?:script|link)[^>]*"https?://', page.read_text()), page
