"""The package as it is built, installed and used without a checkout."""

import ast
import email
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bpd_jax
from bpd_jax.__main__ import commands
from tests.commands import python

ROOT = pathlib.Path(__file__).parent.parent
BUILT = [
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE",
    "requirements.txt",
    "bpd_jax",
    "gin_configs",
]


def run(*arguments, cwd, **environment):
    """Runs a program without access to the checkout; returns its standard output."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in arguments],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def build(folder):
    """Builds an sdist, and from it the wheel that is returned, as `python -m build`.

    Large files are replaced by empty ones, which is much faster.
    """

    def copy(path, target):
        if pathlib.Path(path).stat().st_size < 100_000:
            return shutil.copy(path, target)
        return pathlib.Path(target).touch()

    source = folder / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=ignored, copy_function=copy
            )
        else:
            shutil.copy(ROOT / name, source / name)
    program = "from setuptools import build_meta; build_meta.build_{}({!r})"
    out = str(folder)
    run(sys.executable, "-c", program.format("sdist", out), cwd=source)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    run(sys.executable, "-c", program.format("wheel", out), cwd=unpacked)
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel with all files, the large ones empty."""
    pytest.importorskip("setuptools")
    return build(tmp_path_factory.mktemp("built"))


def test_wheel_contains_exactly_the_package_files(built):
    assert built.name == f"bpd_jax-{bpd_jax.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
    expected = {
        f"bpd_jax/{file.relative_to(ROOT)}"
        for file in ROOT.glob("gin_configs/**/*.gin")
    }
    for pattern in ("bpd_jax/**/*.py", "bpd_jax/shipped/**/*", "bpd_jax/reporting/*.*"):
        expected |= {
            str(file.relative_to(ROOT)) for file in ROOT.glob(pattern) if file.is_file()
        }
    assert expected <= names
    # No tests, caches or other top-level packages.
    unexpected = {name for name in names - expected if ".dist-info/" not in name}
    assert unexpected == set()


def metadata_of(wheel):
    """The METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def required(lines, extras=()):
    """Name and extras of the requirements that hold here and with these extras."""
    requirements = [Requirement(line) for line in lines]
    return [
        (canonicalize_name(requirement.name), tuple(requirement.extras))
        for requirement in requirements
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": e}) for e in extras or ("",))
    ]


def all_required(wheel):
    """Names of the distributions that the wheel and these require, without extras."""
    known = set()
    pending = required(metadata_of(wheel).get_all("Requires-Dist"))
    while pending:
        if (requirement := pending.pop()) not in known:
            known.add(requirement)
            name, extras = requirement
            pending += required(importlib.metadata.requires(name) or (), extras)
    return {name for name, _ in known}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A folder with the unpacked wheel, in which `bin` has its program."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    run(*pip, "--disable-pip-version-check", "--target", folder, built, cwd=folder)
    return folder


def test_commands_import_only_declared_packages(built, installed, tmp_path):
    """Importing a command imports no extras; they are imported when they are used."""
    program = """
import importlib
import os
import sys
absent, *names = sys.argv[1:]
# None in sys.modules makes the import of that name fail.
sys.modules.update(dict.fromkeys(absent.split()))
importlib.import_module("bpd_jax.api")
for name in names:
    # In a process of its own, because two commands may define the same flag.
    if not (child := os.fork()):
        importlib.import_module(f"bpd_jax.{name}")
        sys.stderr.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"importing {name} failed")
"""
    without_extras = all_required(built)
    absent = [
        name
        for name, owners in importlib.metadata.packages_distributions().items()
        if without_extras.isdisjoint(map(canonicalize_name, owners))
        and name not in ("bpd_jax", "pip", "_distutils_hack")
    ]
    assert {"tensorflow", "seqio", "pytest"} <= {*absent}
    assert {"jax", "numpy"}.isdisjoint(absent)
    names = [name for name, _ in commands()]
    run(
        *(sys.executable, "-c", program, " ".join(absent), *names),
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )


def test_every_imported_package_is_a_requirement(built):
    """Also for imports inside functions, and for dependencies of dependencies."""
    with zipfile.ZipFile(built) as archive:
        sources = {
            name: archive.read(name).decode()
            for name in archive.namelist()
            if name.endswith(".py")
        }
    direct = {
        canonicalize_name(Requirement(line).name)
        for line in metadata_of(built).get_all("Requires-Dist")
    }
    exempt = {"bpd_jax", *sys.stdlib_module_names}
    owners = importlib.metadata.packages_distributions()
    undeclared = {}
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                imported = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported = {node.module}
            else:
                continue
            for name in {module.partition(".")[0] for module in imported} - exempt:
                # tensorflow may be installed as tensorflow-cpu, lm_eval not at all.
                names = map(canonicalize_name, [name, *owners.get(name, ())])
                if not direct & set(names):
                    undeclared[name] = file
    assert {"jax", "apache-beam"} <= direct
    assert undeclared == {}


def test_gin_files_are_read_without_a_checkout(installed, tmp_path):
    (tmp_path / "mine.gin").write_text("include 'heads/model_targets.gin'\nSTEPS = 5\n")
    program = """
import json
from bpd_jax.base import configuration
from bpd_jax.training.config import TrainConfig
for name in ("runs/pretrain.gin", "gin_configs/runs/pretrain.gin"):
    parsed = configuration.parse([name, "mine.gin"], [], TrainConfig)
    print(json.dumps([parsed.files, parsed.value.head_targets, parsed.value.steps]))
print(configuration.__file__)
"""
    path = {"PYTHONPATH": str(installed)}
    out = run(sys.executable, "-c", program, cwd=tmp_path, **path)
    *results, path = out.splitlines()
    assert pathlib.Path(path).is_relative_to(installed)
    assert len(results) == 2
    for result in results:
        files, *values = json.loads(result)
        assert files[0] == "gin_configs/runs/pretrain.gin"
        assert files[-1] == "gin_configs/heads/model_targets.gin"
        assert values == ["model", 5]


def test_bpd_lists_and_runs_commands(installed, tmp_path):
    program, path = installed / "bin" / "bpd", {"PYTHONPATH": str(installed)}
    listed = run(program, cwd=tmp_path, **path)
    for name, description in commands():
        assert f"{name} " in listed
        assert description in listed
    version = run(program, "--version", cwd=tmp_path, **path)
    assert version == f"bpd_jax {bpd_jax.__version__}\n"
    result = subprocess.run(
        [program, "decod"], env={**os.environ, **path}, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "did you mean decode" in result.stderr


def test_commands_are_the_entry_points_of_the_package():
    """Tests call `cli.run(main)`; `python -m bpd_jax.NAME` must do the same."""
    programs = {}
    for file in (ROOT / "bpd_jax").glob("*.py"):
        _, main, end = file.read_text().partition('if __name__ == "__main__":\n')
        if main and file.stem != "__main__":
            programs[file.stem] = end.strip()
    assert {name for name, _ in commands()} == programs.keys()
    assert {"decode", "train", "build_ngram"} <= programs.keys()
    assert programs.pop("lm_eval") == "main()"
    runs = "cli.run(main", "process_flags.run(main"
    assert all(end.startswith(runs) for end in programs.values())
    assert all(description.endswith((".", "`.")) for _, description in commands())


def test_importing_the_package_imports_no_heavy_library():
    program = "import sys; import bpd_jax; print(*sys.modules); print(dir(bpd_jax))"
    result = python("-c", program)
    assert result.returncode == 0, result.stderr
    modules, names = result.stdout.splitlines()
    heavy = {"jax", "numba", "numpy", "flax", "absl", "gin", "bpd_jax.api"}
    assert heavy.isdisjoint(modules.split())
    assert {"generate", "load", "stream"} <= set(ast.literal_eval(names))
