"""Layers of the package, which files may import a heavy library, lengths of files.

Imports are read from the syntax tree, so an import inside a function counts, and a
name in a comment or a string does not.
"""

import ast
import functools
import graphlib
import pathlib
import re
from fnmatch import fnmatch

import pytest

from tests.closure import BUDGETS, closure
from tests.commands import python

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "bpd_jax").rglob("*.py"))
MAX_LINES = 500

# From the bottom up: a layer imports itself and the layers before it. The core, whose
# files import no other package of bpd_jax, comes first.
CORE = [
    "base",
    "storage",
    "models",
    "data",
    "ngrams",
    "training",
    "drafting",
    "decoding",
    "api",
    "evaluation",
]
ROOMS = ["cpu", "formats", "reporting", "studies", "compilation"]
LAYERS = [*CORE, *ROOMS]

# Heavy libraries, and the files that may import each.
ALLOWED_FILES = {
    "tensorflow": ["bpd_jax/data/*"],
    "tensorflow_text": ["bpd_jax/data/*"],
    "tensorflow_datasets": ["bpd_jax/data/*"],
    "seqio": ["bpd_jax/data/*"],
    "pynini": ["bpd_jax/drafting/engines/fst.py"],
    "pywrapfst": ["bpd_jax/drafting/engines/fst.py"],
    "apache_beam": [
        "bpd_jax/ngrams/counting/count_pipeline.py",
        "bpd_jax/data/beam_pipelines.py",
        "bpd_jax/data/cache_pipeline.py",
    ],
    "numba": ["bpd_jax/ngrams/*_kernels.py"],
    "llvmlite": ["bpd_jax/cpu/*.py"],
    "flax.linen": ["bpd_jax/models/*", "bpd_jax/cpu/ordered_functions.py"],
    "flax.nnx": [],
    "gin": ["bpd_jax/base/configuration.py", "bpd_jax/base/settings.py"],
    "pandas": ["bpd_jax/reporting/table_files.py"],
    "lm_eval": ["bpd_jax/lm_eval.py"],
    "fsspec": ["bpd_jax/storage/paths.py"],
    "google.cloud": [],
    "gcsfs": [],
    "jax._src": ["bpd_jax/base/jax_private.py"],
    "jaxlib": ["bpd_jax/base/jax_private.py"],
    "rouge_score": ["bpd_jax/evaluation/metrics.py"],
}

# Files that need llvmlite to be imported.
WITH_LLVMLITE = [f"bpd_jax/cpu/{name}.py" for name in ("xla_kernel", "*_code")]

# Libraries that are not installed on GPU and TPU hosts.
ABSENT = [
    "tensorflow",
    "tensorflow_datasets",
    "seqio",
    "pynini",
    "apache_beam",
    "numba",
    "llvmlite",
    "rouge_score",
]


@functools.cache
def imports_of(file: pathlib.Path) -> set[str]:
    """Full names of what a file of this repository imports, wherever in the file.

    `from a import b` gives both `a` and `a.b`, because b may be a module.
    """
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def is_within(name: str, module: str) -> bool:
    """Whether `name` is the module or something in it."""
    return name == module or name.startswith(module + ".")


def layer_of(parts: tuple[str, ...]) -> int:
    """Layer of `bpd_jax.<parts>`: the package itself 0, entry points the highest."""
    if not parts:
        return 0
    return 1 + (LAYERS.index(parts[0]) if parts[0] in LAYERS else len(LAYERS))


def layer_of_file(file: pathlib.Path) -> int:
    """Layer of a file; `bpd_jax/__init__.py`, which re-exports the API, is highest."""
    parts = tuple(module_name(file).split(".")[1:])
    return layer_of(parts) if parts else 1 + len(LAYERS)


def module_name(file: pathlib.Path) -> str:
    """`bpd_jax/data/rows.py` is `bpd_jax.data.rows`, `.../__init__.py` its folder."""
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


# Flags and settings that are texts and no paths; a new one is here or a path, whose `~`
# is the home folder: `cli.DEFINE_path`, or the annotation `settings.Path`.
TEXTS = {
    *("base", "digest", "products"),  # What states are of, in their header.
    *("baseline", "beam_options", "beam_runner", "coordinator_address"),
    *("feature_layers", "gcloud", "gin_bindings", "heldout_split", "method"),
    *("methods", "name", "only", "point", "precision", "precisions", "program"),
    *("prompt", "sbatch", "select_by", "shard", "share", "show", "size", "split"),
    *("ssh", "study", "sweep", "system", "task", "template_arg", "title", "tokens"),
    *("topology", "zone"),
}
TEXT_FLAGS = {"DEFINE_string", "DEFINE_multi_string", "DEFINE_list"}


def texts_of(file: pathlib.Path) -> set[str]:
    """Flags, and fields of settings that are one text or several, in a file."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # `cli.define_flags` gives the name as a variable.
            if node.func.attr in TEXT_FLAGS and isinstance(node.args[0], ast.Constant):
                names.add(node.args[0].value)
        elif isinstance(node, ast.ClassDef):
            bases = map(ast.unparse, node.bases)
            if any(re.fullmatch(r"Validated|\w+(Settings|Config)", x) for x in bases):
                names.update(
                    ast.unparse(field.target)
                    for field in node.body
                    if isinstance(field, ast.AnnAssign)
                    and re.match(
                        r"(tuple\[)?(str|Words)\b", ast.unparse(field.annotation)
                    )
                )
    return names


def test_every_flag_and_setting_is_a_path_or_a_known_text():
    texts = set()
    for folder in ("bpd_jax", "experiments", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            unknown = texts_of(file) - TEXTS
            assert not unknown, f"{file}: declare {unknown} as paths, or as TEXTS here"
            texts |= texts_of(file)
    assert texts == TEXTS


def test_every_package_is_in_a_layer():
    folders = {file.parent.name for file in ROOT.glob("bpd_jax/*/__init__.py")}
    assert folders | {"api"} == set(LAYERS)


@pytest.mark.parametrize("library", ALLOWED_FILES)
def test_heavy_libraries_are_imported_only_in_allowed_files(library):
    violations = [
        f"{path} imports {name}"
        for file in FILES
        if not any(
            fnmatch(path := file.relative_to(ROOT).as_posix(), pattern)
            for pattern in ALLOWED_FILES[library]
        )
        for name in imports_of(file)
        if is_within(name, library)
    ]
    assert violations == []


def test_modules_import_only_their_layer_and_lower_ones():
    """So no file of the core imports a room: rooms register themselves, or are named.

    `DeviceOps` names `cpu` by its platform, `other_formats` names `formats`.
    """
    violations = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in FILES
        for name in sorted(imports_of(file))
        if is_within(name, "bpd_jax")
        and layer_of(tuple(name.split(".")[1:])) > layer_of_file(file)
    ]
    assert violations == []


def test_imports_have_no_cycle():
    # The package itself is left out: everything is in it, and it imports the API.
    modules = {module_name(file): imports_of(file) for file in FILES}
    del modules["bpd_jax"]
    graph = {name: imports & modules.keys() for name, imports in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # Raises a CycleError.


def test_no_test_imports_an_entry_point():
    """Two entry points in one process define the same flags; tests run them."""
    commands = {
        module_name(file)
        for folder in ("bpd_jax", "benchmarks", "experiments")
        for file in (ROOT / folder).rglob("*.py")
        if re.search(r"flags\.DEFINE_|define_flags\(", file.read_text())
    }
    violations = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for name in sorted(imports_of(file) & commands)
        if name not in ("bpd_jax.base.configuration", "bpd_jax.base.cli")
    ]
    assert violations == []


def test_no_file_is_too_long():
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for folder in ("bpd_jax", "tests", "benchmarks", "experiments")
        for file in (ROOT / folder).rglob("*.py")
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize("file", BUDGETS)
def test_files_drag_in_few_others(file):
    """Imports at the top of modules: to read a file is to know what it imports."""
    most_files, most_lines = BUDGETS[file]
    found = closure(file)
    assert len(found) <= most_files, sorted(map(str, found))
    assert sum(found.values()) <= most_lines


def test_every_module_has_a_docstring():
    undocumented = [
        str(file.relative_to(ROOT))
        for file in FILES
        if (source := file.read_text()).strip()
        and not ast.get_docstring(ast.parse(source))
    ]
    assert undocumented == []


def test_gpu_and_tpu_hosts_need_no_heavy_library():
    modules = [
        module_name(file)
        for file in FILES
        if file.relative_to(ROOT).parts[1] in LAYERS
        and file.relative_to(ROOT).parts[1] != "data"
        and not any(
            fnmatch(file.relative_to(ROOT).as_posix(), pattern)
            for pattern in [*ALLOWED_FILES["numba"], *WITH_LLVMLITE]
        )
    ]
    import_without(ABSENT, modules)


def test_the_python_interface_needs_no_gin():
    import_without(["gin"], ["bpd_jax.api", "bpd_jax.training.trainer"])


def import_without(absent: list[str], modules: list[str]) -> None:
    """Imports modules in a new interpreter on which some libraries are absent."""
    # None in sys.modules makes the import of that name fail.
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({absent}))\n"
        f"for name in {modules}: importlib.import_module(name)\n"
    )
    result = python("-c", program)
    assert result.returncode == 0, result.stderr
