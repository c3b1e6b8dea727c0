"""The examples in docstrings are run as doctests."""

import doctest
import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Entry points are left out: two of them in one process define the same flags.
ENTRY_POINTS = [
    file
    for file in ROOT.glob("bpd_jax/*.py")
    if re.search(r"= flags\.DEFINE_|cli\.(define_flags|run)\(", file.read_text())
]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "bpd_jax").rglob("*.py"))
    if ">>> " in file.read_text() and file not in ENTRY_POINTS
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_give_the_printed_results(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
