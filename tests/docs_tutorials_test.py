"""The tutorials that add a method and a task run as they stand, on a copy of all.

Their files are written, their patches applied, their code and commands run in order.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)


class Reader:
    """Does what a page says, in a folder of its own."""

    def __init__(self, page: pathlib.Path, folder: pathlib.Path) -> None:
        self.text, self.folder = page.read_text(), folder
        ignore = shutil.ignore_patterns("shipped", "__pycache__")
        shutil.copytree(ROOT / "bpd_jax", folder / "bpd_jax", ignore=ignore)
        shutil.copytree(ROOT / "gin_configs", folder / "gin_configs")

    def follow(self) -> str:
        """Everything in its order; returns what was printed."""
        printed, script = "", ""
        for language, title, code in BLOCK.findall(self.text):
            if title:
                (self.folder / title).write_text(code)
            elif language == "diff":
                self._run(["git", "apply", "-"], code)
            elif language == "python":
                script += code
            elif language == "bash":
                printed += self._python(script)
                script = ""
                for line in code.replace("\\\n", " ").splitlines():
                    printed += self._run([sys.executable, *shlex.split(line)[1:]])
        return printed + self._python(script)

    def _python(self, script: str) -> str:
        return self._run([sys.executable, "-c", script]) if script.strip() else ""

    def _run(self, command: list[str], text: str | None = None) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.mark.slow
def test_a_method_is_added(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """On a model that takes seconds to train, in the place of SmolLM2."""
    reader = Reader(TUTORIALS / "add_method.md", tmp_path)
    shutil.copytree(trained / "run", tmp_path / "runs" / "demo")
    prompts = tmp_path / "experiments" / "smollm2" / "prompts.txt"
    prompts.parent.mkdir(parents=True)
    prompts.write_text("3 times 4\n5 times\n")
    for said, meant in (
        ('"smollm2"', '"demo"'),
        ("--model=smollm2", "--model=demo"),
        ("max_new_tokens=48", "max_new_tokens=24"),  # of texts of 96 in all
    ):
        assert said in reader.text
        reader.text = reader.text.replace(said, meant)
    printed = reader.follow()
    assert len(re.findall(r"^[\d.]+ tokens per serial call$", printed, re.M)) == 2
    assert len(re.findall(r"^[\d.]+ tokens .* by heads", printed, re.M)) == 3
    assert re.search(r"Bigram walk of 8 .*identical", printed)


@pytest.mark.slow
def test_a_task_is_added(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorflow")
    printed = Reader(TUTORIALS / "add_task.md", tmp_path).follow()
    assert (tmp_path / "runs" / "gsm8k_rows" / "rows.json").is_file()
    assert printed.count("identical") >= 3
