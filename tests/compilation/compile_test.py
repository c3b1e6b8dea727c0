"""The command `bpd_jax.compile`.

Tests that need a compiler are run by `make tpu-test` and `make gpu-test`.
"""

import json

import pytest

from benchmarks.compile_settings import SETTINGS
from bpd_jax.base import configuration
from bpd_jax.base.chips import device_count
from bpd_jax.training.config import TrainConfig
from tests.commands import ROOT, assert_refused, python, start
from tests.compilation.compilers import NEEDS_CUDA, NEEDS_LIBTPU
from tests.experiments.configurations import gin_arguments

TINY = [
    "--gin_file=gin_configs/models/tiny.gin",
    "--gin_file=gin_configs/tasks/text_files.gin",
    "--gin_file=gin_configs/runs/train.gin",
    "--gin.TEXT_FILES='nowhere/*.txt'",
    "--gin.STEPS=10",
    "--gin.LEARNING_RATE=0.001",
    "--gin.TransformerConfig.num_layers=1",
    "--gin.TransformerConfig.dtype='bfloat16'",
]


def arguments_of(*flags, batch_size=8, length=128):
    return [*TINY, f"--gin.BATCH_SIZE={batch_size}", f"--gin.LENGTH={length}", *flags]


def run(*flags, **sizes):
    arguments = arguments_of(*flags, **sizes)
    return python("-m", "bpd_jax.compile", *arguments, XLA_FLAGS="")


def short(number):
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def gib(size):
    return f"{size / 2**30:.1f}"


def minimum_time(program):
    kind, seconds = max(program["minimum_seconds"].items(), key=lambda item: item[1])
    return f"{short(1000 * seconds)} ms ({kind.replace('compute', 'arithmetic')})"


def collectives(program):
    others = dict(program["collectives"])
    sums = others.pop("all-reduce", 0)
    return f"{sums} + {sum(others.values())}" if others else f"{sums}"


def rows_of(name, result):
    """The rows of docs/measured.md with a result of benchmarks.compile_all."""
    programs = result.get("programs", {})
    titles = {"read texts": ", states of texts"} if len(programs) > 1 else {}
    for title, program in programs.items():
        memory = program["memory_per_core"]
        usable = f"{round(memory['usable'] / 2**30, 2):g}"
        where = [result["topology"], ", ".join(map(str, program["mesh"].values()))]
        if "prefill" in programs:
            two = programs["prefill"], programs["decode"]
            needed = [gib(each["memory_per_core"]["needed"]) for each in two]
            counts = [*map(collectives, two), *map(minimum_time, two)]
            yield [f"`{name}`", *where, *needed, usable, *counts]
            return
        about = titles.get(title, f", {title}" if titles else "")
        yield [
            f"`{name}`{about}",
            *where,
            f"{gib(memory['needed'])} of {usable} GiB",
            f"{short(program['model_flops_per_core'] / 1e12)} T",
            f"{program['read_bytes_per_core'] / 2**30:.2f} GiB",
            minimum_time(program),
        ]


def test_the_tables_of_the_docs_are_the_record():
    record = json.loads((ROOT / "benchmarks/results/compile.json").read_text())
    assert [*record] == [*SETTINGS]
    lines = (ROOT / "docs" / "measured.md").read_text().splitlines()
    shown = 0
    for name, result in record.items():
        rows = [f"| {' | '.join(row)} |" for row in rows_of(name, result)]
        documented = [x for x in lines if x.startswith(f"| `{name}`")]
        # A setting that is refused has no figures.
        assert not rows or documented in ([], rows)
        shown += len(documented)
    assert shown > 40


@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if "--program=frozen" not in SETTINGS[name][1]]
)
def test_compiled_settings_fit_their_slices(name):
    """Their gin files resolve, and the mesh divides the slice's cores and the rows."""
    topology, arguments = SETTINGS[name]
    config = configuration.parse(*gin_arguments(arguments), TrainConfig).value
    cores = device_count(topology)
    mesh = config.mesh
    parts = mesh.fsdp * mesh.model
    assert cores % parts == 0
    if mesh.data > 0:
        assert mesh.data * parts == cores
    if "--program=decode" not in arguments:
        assert config.batch_size % (cores // mesh.model) == 0


def test_invalid_flags_are_refused(tmp_path):
    """Also output folders that cannot be written, before anything is compiled."""
    (tmp_path / "file").write_text("")
    (tmp_path / "train.txt").mkdir()
    cases = {
        ("--topology=v5e:2x2", "--program=serve"): "list of train, decode",
    } | {
        ("--topology=v9:2x2", f"--hlo={folder}"): f"cannot write {folder / 'train.txt'}"
        for folder in (tmp_path / "file", tmp_path)
    }
    commands = [arguments_of(*flags) for flags in cases]
    results = start("bpd_jax.compile", *commands)
    for result, message in zip(results, cases.values(), strict=True):
        assert_refused(result, message)


def compiled(folder, topology, *flags):
    """What the command prints, and its figures of every program."""
    output = folder / "figures.json"
    flags = f"--topology={topology}", "--gin.MeshConfig.fsdp=2", *flags
    result = run(*flags, f"--output={output}")
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout, json.loads(output.read_text())["programs"]


def check_memory(program, usable):
    memory = program["memory_per_core"]
    assert 0 < memory["needed"] < memory["usable"] == int(usable * 2**30)
    assert memory["donated"] == pytest.approx(memory["arguments"], rel=0.1)
    assert program["collectives"]["all-gather"] > 0


@NEEDS_CUDA
def test_train_and_decode_steps_are_compiled_without_a_gpu(tmp_path):
    printed, programs = compiled(
        tmp_path,
        "h100:4",
        *("--program=train,decode", "--num_ngrams=100000"),
        *("--prompt_tokens=64", "--max_new_tokens=32"),
    )
    assert "h100:4: 4 GPUs" in printed
    assert "2 × 2 × 1" in printed
    train = programs["train"]
    check_memory(train, 79)
    # The state, without the batch.
    donated = train["memory_per_core"]["donated"]
    assert train["read_bytes_per_core"] == pytest.approx(donated, rel=0.1)
    assert programs["decode"]["mesh"] == train["mesh"]


@NEEDS_CUDA
def test_a_step_that_does_not_fit_a_gpu_is_refused():
    result = run("--topology=h100:1", batch_size=65536, length=512)
    assert_refused(result, "of 79.00 GiB; shard the parameters")


@NEEDS_LIBTPU
def test_train_step_is_compiled_without_a_tpu(tmp_path):
    text = tmp_path / "hlo"
    printed, programs = compiled(tmp_path, "v5e:2x2", f"--hlo={text}")
    assert "v5e:2x2: 4 cores" in printed
    train = programs["train"]
    check_memory(train, 15.75)
    least = train["minimum_seconds"]
    assert least["compute"] == train["model_flops_per_core"] / 197e12
    assert least["reading"] == train["read_bytes_per_core"] / 8.19e11
    program = (text / "train.txt").read_text()
    assert program.startswith("HloModule jit_step")
    assert "splash_mha_fwd" in program


@NEEDS_LIBTPU
def test_programs_that_do_not_fit_in_memory_are_refused():
    refused = run("--topology=v5e:2x2", "--gin.MeshConfig.fsdp=3")
    assert_refused(refused, "data × fsdp × model = -1 × 3 × 1, but there are 4 devices")
    refused = run(
        "--topology=v5e:2x2",
        "--gin.TransformerConfig.num_layers=400",
        "--gin.ComputeConfig.scan_layers=True",
        "--gin.HEADS=1",
        batch_size=1024,
        length=512,
    )
    assert_refused(refused, "the train step does not fit on v5e:2x2: ")
    assert "15.75G" in refused.stderr
    assert "; shard the parameters over more devices" in refused.stderr


@NEEDS_LIBTPU
def test_train_step_is_compiled_for_two_slices(tmp_path):
    printed, programs = compiled(tmp_path, "v5e:2x2", "--slices=2")
    assert "2 × v5e:2x2: 8 cores" in printed
    assert programs["train"]["mesh"] == {"data": 4, "fsdp": 2, "model": 1}
    refused = run("--topology=v5e:2x2", "--slices=2", "--gin.MeshConfig.fsdp=8")
    assert_refused(refused, "data = 1 is not a multiple of the 2 TPU slices")
