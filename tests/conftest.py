"""Eight virtual CPU devices for every test, and a trained model for those that decode.

The devices and the cache of compiled programs are set before jax is imported. Programs
and kernels are those of a processor with AVX2, whatever the machine has, unless a test
asks for other `instructions`.
"""

import contextlib
import fcntl
import gc
import importlib.util
import os
import pathlib
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from bpd_jax.base import compiled
from bpd_jax.base.compiled import forget_compiled

if TYPE_CHECKING:
    from tests.fake_storage import FakeStorage

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

# Tests compile far longer than they compute, so code is compiled quickly, not well.
_XLA_FLAGS = (
    *(["--xla_cpu_max_isa=AVX2"] if _IS_X86 else []),
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_llvm_enable_alias_scope_metadata=false",
    "--xla_llvm_enable_noalias_metadata=false",
    # Generating code for fusions with MLIR takes longer than compiling all the rest.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# On a CPU each compiled program takes a dozen memory mappings, of which Linux allows
# a process 65,530: past them the compiler dies. A process with 8,000 has 4 to 5 GB.
_MOST_MAPPINGS = 8_000
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# Hundreds of processes import the same modules: their bytecode is kept, even where the
# environment says otherwise.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# By default Python collects garbage so often that it takes 7 % of the time: jax and
# TensorFlow make hundreds of thousands of objects that stay.
gc.set_threshold(50_000, 20, 50)

# A shell makes processes that it starts in the background ignore Ctrl-C, which tests
# send. Only the main thread may change that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.default_int_handler)

# All workers, the processes that they start and later runs share what is compiled.
_COMPILED = pathlib.Path(__file__).parent.parent / ".pytest_cache" / "compiled"
_MOST_COMPILED = 50_000
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Workers take whole files. Those that take longest begin first, so that all workers end
# at about the same time. The tests of several processes, which wait most of their time,
# stand between those that compute.
_LONGEST = (
    "decoding/lossless_test.py",
    "entry_points_test.py",
    "training/drafter_blocks_test.py",
    "experiments/run_test.py",
    "bucket_runs_test.py",
    "training/heads/drafter_test.py",
    "training/hosts_test.py",
    "processes_test.py",
    "decoding/replay_test.py",
    "drafting/searches/best_test.py",
    "shipped_test.py",
    "training/resume_test.py",
    "training/step_test.py",
    "training/refiners_test.py",
    "training/heads/heads_objective_test.py",
    "data/seqio_tasks_test.py",
    "benchmarks/accelerator_test.py",
    "distill_test.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds options that check the shapes in annotations, and that compile as users."""
    parser.addoption("--shapes", action="store_true", help="see tests/shapes.py")
    about = "let XLA compile for this machine as it does for users, on one device"
    parser.addoption("--xla-defaults", action="store_true", help=about)


def pytest_configure(config: pytest.Config) -> None:
    """Sets XLA's flags, and installs the check of shapes before imports of modules."""
    if not config.getoption("--xla-defaults"):
        flags = [os.environ.get("XLA_FLAGS", ""), *_XLA_FLAGS]
        os.environ["XLA_FLAGS"] = " ".join(flags)
    if config.getoption("--shapes"):
        from tests import shapes

        shapes.install()


# Kinds of `instructions`: XLA's limit, and the width of the kernels' tile.
_INSTRUCTIONS = {
    "avx2": ("AVX2", 8),
    "avx512": ("AVX512_VNNI", 16),
    "no kernels": ("SSE4_2", None),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that asks for `instructions` with each kind of its marker."""
    chosen = metafunc.definition.iter_markers("parametrize")
    if "instructions" not in metafunc.fixturenames or any(
        "instructions" in mark.args[0] for mark in chosen
    ):
        return
    marker = metafunc.definition.get_closest_marker("instructions")
    kinds = marker.args if marker else ("avx2", "avx512")
    if metafunc.config.getoption("--xla-defaults") or not _IS_X86:
        kinds = ("own",)
    metafunc.parametrize("instructions", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kind of instructions that kernels use in a test: "avx2" or "avx512".

    `pytest.mark.instructions` names other kinds, such as "no kernels". Other tests
    have AVX2. On ARM and with `--xla-defaults` it is "own", that of this machine.
    Parameters in the layout of one kind are not for another: a fixture that makes them
    asks for this one.
    """
    from bpd_jax.cpu.tile import tile_of_processor

    own = request.config.getoption("--xla-defaults") or not _IS_X86
    kind = "own" if own else request.param
    with pytest.MonkeyPatch.context() as patch:
        if kind in _INSTRUCTIONS:
            limit, width = _INSTRUCTIONS[kind]
            flags = f"{os.environ['XLA_FLAGS']} --xla_cpu_max_isa={limit}"
            patch.setenv("XLA_FLAGS", flags)
            tile = tile_of_processor()
            if width != (tile and tile.width):
                pytest.skip(f"this processor does not have {kind}")
        elif tile_of_processor() is None:
            pytest.skip("this processor has no kernels")
        forget_compiled()
        yield kind
    forget_compiled()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the tests of the longest files to the beginning."""
    folder = pathlib.Path(__file__).parent
    order = {folder / name: index for index, name in enumerate(_LONGEST)}
    assert all(path.is_file() for path in order), order
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish() -> None:
    """Excludes what the imports have made, which stays, from later collections.

    Otherwise every full collection, which many tests and JAX itself request, visits
    millions of objects.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Deletes compiled programs when there are many: most are of old code."""
    if hasattr(session.config, "workerinput") or not _COMPILED.is_dir():
        return
    if len(os.listdir(_COMPILED)) > _MOST_COMPILED:
        shutil.rmtree(_COMPILED)


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    """Frees the compiled programs after a file, when there are many."""
    yield
    # Commands that ran in this process enabled it.
    compiled._keeps = False
    with contextlib.suppress(OSError):
        if pathlib.Path("/proc/self/maps").read_bytes().count(b"\n") > _MOST_MAPPINGS:
            forget_compiled()


@pytest.fixture(scope="session")
def made_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, Callable[[pathlib.Path], None]], pathlib.Path]:
    """A function that returns a folder which the first worker that asks has filled.

    All workers of a session share the folder, so nobody may write into it.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def make(name: str, fill: Callable[[pathlib.Path], None]) -> pathlib.Path:
        folder, complete = base / f"shared-{name}", base / f"shared-{name}.complete"
        with (base / f"shared-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                complete.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def trained(made_once: Callable[..., pathlib.Path]) -> pathlib.Path:
    """A folder with `run`, a small trained model with its n-gram model.

    Nobody may write into it. `texts` is what it was trained on, and `plain` is a run
    folder of a model without block heads.
    """
    return made_once("trained", _train)


@pytest.fixture(scope="session")
def storage(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator["FakeStorage"]:
    """A server with one bucket, `bpd-test`, and a cache of its own for copies.

    Clients look for it once in a process, so there is one for all tests.
    """
    if importlib.util.find_spec("gcsfs") is None:
        pytest.skip("needs the extra gcs")
    from tests.fake_storage import FakeStorage

    with FakeStorage("bpd-test") as served, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", served.url)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", served.url)
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # Clients do not ask for the credentials of a machine in the cloud.
        patch.setenv("NO_GCE_CHECK", "true")
        yield served


def _train(folder: pathlib.Path) -> None:
    from bpd_jax.data.text_task import TextTask
    from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
    from bpd_jax.models.transformer_config import TransformerConfig
    from bpd_jax.ngrams.build_model import build
    from bpd_jax.ngrams.build_settings import BuildSettings
    from bpd_jax.training.config import OptimizerConfig, TrainConfig
    from bpd_jax.training.trainer import train

    (folder / "texts").mkdir()
    for number in range(12):
        lines = [f"{number} times {k} is {number * k}." for k in range(20)]
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines))
    texts = str(folder / "texts" / "*.txt")
    heads = BlockHeadsConfig(4, hidden=8)
    for name, model_heads, steps in (("run", heads, 60), ("plain", None, 2)):
        config = TrainConfig(
            model=BlockwiseConfig(
                TransformerConfig(270, 1, 16, 32, num_heads=2, max_length=96),
                model_heads,
            ),
            task=TextTask("text_files", texts, "bpe:270", validation_fraction=0.25),
            optimizer=OptimizerConfig(learning_rate=1e-2),
            batch_size=8,
            length=32,
            steps=steps,
        )
        train(config, folder / name)
    build(
        BuildSettings(
            output=str(folder / "run" / "ngram"),
            text=texts,
            order=3,
            vocabulary=str(folder / "run"),
        )
    )
