"""The tutorials that add a method and a task run as printed, on a copy of the package.

Their files are written, their patches applied, their code and commands run in order.
"""

import ast
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from tests.commands import python

ROOT = pathlib.Path(__file__).parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)


class Reader:
    """Follows the steps of a page in a folder of its own."""

    def __init__(self, page: pathlib.Path, folder: pathlib.Path) -> None:
        self.text, self.folder = page.read_text(), folder
        ignore = shutil.ignore_patterns("shipped", "__pycache__")
        shutil.copytree(ROOT / "bpd_jax", folder / "bpd_jax", ignore=ignore)
        shutil.copytree(ROOT / "gin_configs", folder / "gin_configs")

    def write(self, language: str, title: str, code: str) -> bool:
        """Writes a file or applies a patch; returns False for any other block."""
        if title:
            (self.folder / title).write_text(code)
        elif language == "diff":
            apply = ["git", "apply", "-"]
            subprocess.run(apply, cwd=self.folder, input=code, text=True, check=True)
        return bool(title) or language == "diff"

    def follow(self) -> str:
        """Performs all steps in order; returns what was printed."""
        printed, script = "", ""
        for language, title, code in BLOCK.findall(self.text):
            if self.write(language, title, code):
                continue
            if language == "python":
                script += code
            elif language == "bash":
                printed += self._python("-c", script)
                script = ""
                for line in code.replace("\\\n", " ").splitlines():
                    printed += self._python(*shlex.split(line)[1:])
        return printed + self._python("-c", script)

    def _python(self, *arguments: str) -> str:
        result = python(*arguments, folder=self.folder, PYTHONPATH=str(self.folder))
        assert result.returncode == 0, f"{arguments}\n{result.stdout}\n{result.stderr}"
        return result.stdout


@pytest.mark.parametrize("page", ["add_method", "add_task"])
def test_patches_apply_and_code_compiles(page: str, tmp_path: pathlib.Path) -> None:
    reader = Reader(TUTORIALS / f"{page}.md", tmp_path)
    blocks = BLOCK.findall(reader.text)
    assert any(language == "diff" or title for language, title, _ in blocks)
    for language, title, code in blocks:
        reader.write(language, title, code)
        if language == "python":
            ast.parse(code)
    for file in tmp_path.rglob("*.py"):
        ast.parse(file.read_text())


@pytest.mark.exhaustive
def test_a_method_is_added(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """On a model that trains in seconds, instead of SmolLM2."""
    reader = Reader(TUTORIALS / "add_method.md", tmp_path)
    shutil.copytree(trained / "run", tmp_path / "runs" / "demo")
    prompts = tmp_path / "experiments" / "smollm2" / "prompts.txt"
    prompts.parent.mkdir(parents=True)
    prompts.write_text("3 times 4\n5 times\n")
    for printed_text, replacement in (
        ('"smollm2"', '"demo"'),
        ("--model=smollm2", "--model=demo"),
        ("max_new_tokens=48", "max_new_tokens=24"),  # of texts of 96 in all
    ):
        assert printed_text in reader.text
        reader.text = reader.text.replace(printed_text, replacement)
    printed = reader.follow()
    assert len(re.findall(r"^[\d.]+ tokens per serial call$", printed, re.M)) == 2
    assert len(re.findall(r"^[\d.]+ tokens .* by heads", printed, re.M)) == 3
    assert re.search(r"Bigram walk of 8 .*identical", printed)


@pytest.mark.exhaustive
def test_a_task_is_added(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorflow")
    printed = Reader(TUTORIALS / "add_task.md", tmp_path).follow()
    assert (tmp_path / "runs" / "gsm8k_rows" / "rows.json").is_file()
    assert printed.count("identical") >= 3
