"""The check of an accelerator, at the smallest sizes and on a CPU."""

import collections
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import zipfile

import pytest

from benchmarks.accelerator_parts import costs, lossless, results, smollm2, speedups
from benchmarks.accelerator_parts.jobs import JobSettings, random_decoder
from benchmarks.synthetic_ngrams import synthetic_model
from bpd_jax.base.chips import CHIPS
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.drafting.assets import Assets
from bpd_jax.storage.paths import as_path
from tests.commands import ROOT, assert_all_refused, python, succeed
from tests.decoding.random_models import make_drafter, make_model, make_ngram

COMMAND = "benchmarks.accelerator"
GOLDEN = ROOT / "tests" / "formats" / "golden" / "llama"
SMALL = ("--tiny", "--platform=cpu", "--rounds=1", "--batch_sizes=2")

# Runs the check where some libraries are missing, and others are only in wheels.
PROGRAM = """
import importlib.machinery, runpy, sys
ABSENT = {"tensorflow", "tensorflow_datasets", "seqio", "pynini", "apache_beam"}
class Blocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ABSENT:
            raise ModuleNotFoundError(name)
        if name in ("gin", "gguf"):
            wheels = [place for place in sys.path if place.endswith(".whl")]
            return importlib.machinery.PathFinder.find_spec(name, wheels)
sys.meta_path.insert(0, Blocked)
sys.argv = ARGUMENTS
try:
    runpy.run_module("benchmarks.accelerator", run_name="__main__", alter_sys=True)
finally:
    assert ".whl" in sys.modules["gin"].__file__
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle without weights; its wheels hold the installed packages."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "wheels").mkdir()
    for name in ("gin", "gguf"):
        [package] = importlib.util.find_spec(name).submodule_search_locations
        with zipfile.ZipFile(folder / "wheels" / f"{name}-1-py3.whl", "w") as wheel:
            for file in pathlib.Path(package).rglob("*.py"):
                wheel.write(file, file.relative_to(pathlib.Path(package).parent))
    result = succeed(
        "benchmarks.bundle",
        "--noweights",
        "--text_bytes=400000",
        "--heldout_share=0.3",
        "--vocabulary=bpe:300",
        f"--wheels={folder / 'wheels'}",
        f"--output={folder / 'bundle'}",
    )
    assert "MiB; run there: sh run.sh" in result.stdout
    return folder / "bundle"


@pytest.fixture(scope="module")
def measured(bundle):
    """The folder of the results of all parts, run in the bundle."""
    (bundle / "prompts.txt").write_text("w5 w6 w7\nw8 w9\n")
    arguments = [
        "accelerator",
        *SMALL,
        "--output=results",
        f"--model={GOLDEN}",
        "--prompts_file=prompts.txt",
        "--lattice_width=4",
    ]
    program = PROGRAM.replace("ARGUMENTS", repr(arguments))
    result = python("-c", program, folder=bundle, PYTHONPATH=str(bundle))
    assert result.returncode == 0, result.stdout + result.stderr
    return bundle / "results"


def test_a_bundle_holds_what_the_check_needs(bundle):
    names = {path.name for path in bundle.iterdir()} - {"results", "prompts.txt"}
    assert names == {
        *("bpd_jax", "benchmarks", "gin_configs", "LICENSE"),
        *("wheels", "corpus", "bundle.json", "run.sh"),
    }
    about = json.loads((bundle / "bundle.json").read_text())
    assert about["part"] == 1
    assert sum(about["bytes"].values()) < 30 * 2**20
    assert "-m benchmarks.accelerator" in (bundle / "run.sh").read_text()


@pytest.fixture(scope="module")
def rows(measured):
    """The results by part and job."""
    rows = collections.defaultdict(dict)
    for row in results.read(measured):
        assert (row["platform"], row["tiny"]) == ("cpu", True)
        assert row["command"].startswith("python -m benchmarks.accelerator")
        rows[row["part"]][row["job"]] = row
    return rows


def test_kernels_and_methods_are_compared_with_references(rows):
    kinds = "xla", "fused", "pallas", "cache"
    assert set(rows["attention"]) == {f"tiny, {kind}" for kind in kinds}
    for row in rows["attention"].values():
        assert row["passed"]
        assert max(row["errors"].values()) < 1e-4
    lossless_methods = rows["lossless"]
    methods = rows["smollm2"]
    assert set(lossless_methods) == {"block+ngram/tree:8+lookup:4"}
    # The other methods need heads, a drafter or n-grams, which the model lacks.
    assert list(methods) == ["llama, batch 2, prompt_lookup:8"]
    for row in [*lossless_methods.values(), *methods.values()]:
        assert row["texts_that_differ"] == 0
        assert row["tokens_per_call"] >= 1


def test_plain_decoding_is_compared_with_the_bandwidth_limit(rows):
    bandwidth = rows["plain"]["copy"]["bytes_per_second"]
    row = rows["plain"]["smollm2_135m, batch 2"]
    assert row["ms_floor"] == pytest.approx(1e3 * row["weights_bytes"] / bandwidth)
    # One layer: q and output 32 x 32, k and v 32 x 16, three times 32 x 64 in the MLP,
    # three norms, and the tied softmax of 64 tokens.
    weights = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 3 * 32 + 64 * 32
    assert row["weights_bytes"] == 4 * weights


def test_costs_give_speedups_of_recorded_methods(rows):
    passes = rows["costs"]["blockwise_1b5, batch 2, passes"]["ms_by_tokens"]
    assert list(passes) == ["1", "4"]
    row = rows["costs"]["blockwise_1b5, batch 2, bpd"]
    slope = (passes["4"] - passes["1"]) / 3
    call = passes["4"] + 5 * slope + row["ms_drafting"]
    expected = speedups.record()["bpd"]["block_efficiency"] * passes["1"] / call
    assert row["speedups"] == {"BPD": pytest.approx(expected)}


def test_training_is_timed_and_a_model_is_trained_on_the_rows_of_the_bundle(rows):
    [step] = rows["training"].values()
    assert step["tokens_per_second"] > 0
    assert step["planned_bytes_per_device"] > 0
    assert step["mfu"] is None  # the peak FLOP/s of a CPU is unknown
    row = rows["joint"]["blockwise_124m"]
    assert row["steps"] == len(row["log"]) == 2
    assert row["texts_that_differ"] == 0


def test_only_missing_jobs_are_run(measured, tmp_path):
    shutil.copytree(measured, tmp_path / "copy")
    flags = *SMALL, "--part=plain", "--missing", f"--output={tmp_path / 'copy'}"
    succeed(COMMAND, *flags)
    content = (measured / results.FILE).read_bytes()
    assert (tmp_path / "copy" / results.FILE).read_bytes() == content


def test_the_default_method_of_an_accelerator_is_compared(monkeypatch):
    model = make_model(0, num_layers=2)
    assets = Assets(ngram=make_ngram(), drafter=make_drafter(model))
    decoder = Decoder(model, width=4, assets=assets)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert "block" in decoder.default_method.name
    names = [method.name for method in smollm2.measured_methods(decoder)]
    assert decoder.default_method.name in names
    # The model has all assets of the others.
    assert len(names) == len(smollm2.METHODS) + 1


def test_every_method_can_be_built():
    """The tests above measure only a few of them."""
    settings = JobSettings(tiny=True, rounds=1, batch_sizes=(1,))
    for name in costs.MODELS:
        config = settings.model(name)
        ngram = synthetic_model(500, config.trunk.vocab_size)
        decoder = random_decoder(config, ngram)
        for method in map(parse_method, costs.METHODS):
            assert decoder.drafter(method).on_device
    decoder = lossless._decoder()
    for method in map(parse_method, lossless.METHODS):
        if not method.is_oracle:
            decoder.drafter(method)


def test_invalid_flags_are_refused(tmp_path):
    cases = {
        "--part=speed": "each element one of attention, lossless",
        "--part=plain --platform=tpu": "jax has no tpu here, only cpu",
        "--rounds=0": "--rounds",
    }
    output = f"--output={tmp_path}"
    cases = [([output, *flags.split()], message) for flags, message in cases.items()]
    assert_all_refused(COMMAND, cases)


def test_missing_files_are_results_that_say_so(tmp_path):
    flags = f"--weights={tmp_path}", f"--output={tmp_path}"
    succeed(COMMAND, *SMALL, "--part=smollm2,joint", *flags)
    failed = {row["part"]: row["failed"] for row in results.read(tmp_path)}
    assert "parts.json" in failed["smollm2"]
    assert "no folder corpus" in failed["joint"]


def test_a_part_ends_at_its_time_limit(tmp_path):
    """Its process is killed before it has a result."""
    result = succeed(
        COMMAND, *SMALL, "--part=plain,costs", "--minutes=1e-3", f"--output={tmp_path}"
    )
    assert "not finished: plain, costs" in result.stdout
    assert results.read(tmp_path) == []


def write(folder, part, platform="gpu", **rows):
    for job, figures in rows.items():
        about = {"part": part, "device": "NVIDIA H100 PCIe", "job": job}
        about |= {"date": "2026-01-02", "versions": {"jax": "1"}, "command": "c"}
        results.append(folder, about | {"platform": platform} | figures)


def test_tables_are_generated_from_the_results(tmp_path):
    step = {"tokens_per_second": 1e5, "mfu": 0.4, "planned_bytes_per_device": 25e9}
    plain = {"ms_per_call": 2.0, "ms_floor": 1.0, "times_floor": 2.0}
    write(tmp_path, "plain", a={"failed": "the first time"}, b={"failed": "no room"})
    write(tmp_path, "plain", a=plain | {"tokens_per_second": 500.0})
    job = "blockwise_1b5, batch 1, bpd"
    drafting = {"ms_drafting": 0.5, "speedups": {"BPD": 1.25}}
    passes = {"ms_by_tokens": {"1": 1.25, "8": 1.5}}
    write(tmp_path, "costs", **{"m, passes": passes, job: drafting})
    write(tmp_path, "training", step=step)
    kernel = {"errors": {"output": 0.5}, "passed": False, "ms_forward": 3.0}
    write(tmp_path, "attention", kernel=kernel)
    method = {"tokens_per_call": 1.5, "texts": 3, "texts_that_differ": 0}
    write(tmp_path, "lossless", bpd=method)
    run = {"steps": 900, "log": [{"loss": 4.0}], "tokens_per_call": 1.2}
    write(tmp_path, "joint", small=step | run)
    write(tmp_path, "smollm2", platform="cpu", x={})
    rows = results.read(tmp_path)
    text = results.tables(rows)
    assert text.count("### NVIDIA H100 PCIe") == 1
    assert {
        "| a | 2 | 1 | 2.00 | 500 |",
        "| b | failed: no room |  |  |  |",
        "| m | 1.25 | 1.5 |",
        f"| drafting, {job} | 0.5 |  |",
        "| step | 100,000 | 40 % | 25.0 |",
        "| kernel | 0.5 | **no** | 3 |",
        "| `bpd` | 1.50 | 0 of 3 |",
        "| small | 900 | 100,000 | 40 % | 4.00 | 1.20 |",
    } <= set(text.splitlines())
    predicted = speedups.table(rows)
    [bpd] = [x for x in predicted.splitlines() if x.startswith("| 1.5B, 1, BPD")]
    assert bpd.split(" | ")[3] == "1.25"  # measured on an H100
    page = tmp_path / "page.md"
    begin_end = "<!-- {0}: begin -->\nold\n<!-- {0}: end -->\n"
    page.write_text(begin_end.format("predictions") + begin_end.format("tables"))
    results.update_page(page, rows)
    new = page.read_text()
    assert text in new
    assert bpd in new
    assert "old" not in new
    page.write_text("no marks")
    with pytest.raises(UserError, match="add them"):
        results.update_page(page, rows)


def test_predictions_follow_from_bandwidth_and_arithmetic():
    config = JobSettings(tiny=False, rounds=1, batch_sizes=(1,)).model("llama_7b")
    bpd, refined = speedups.RECORDED[:2]
    for chip in map(CHIPS.get, speedups.DEVICES):
        # At batch 1 a pass over 9 tokens only reads the weights, those of heads too.
        speedup = speedups.predicted(chip, config, bpd)
        ratio = speedup / speedups.record()["bpd"]["block_efficiency"]
        assert 0.7 < ratio < 1
        faster = speedups.predicted(chip, config, refined)
        assert faster > speedup
    # Where arithmetic is scarce, 69 draft tokens take longer than reading.
    slow = dataclasses.replace(CHIPS["h100"], flops=1e13)
    assert speedups.predicted(slow, config, refined) < 0.5


def test_docs_page_contains_the_tables_of_the_committed_results():
    rows, page = results.read(ROOT / results.FOLDER), (ROOT / results.PAGE).read_text()
    assert results.tables(rows) in page
    assert speedups.table(rows) in page


def test_results_in_a_bucket_are_kept(storage):
    folder = as_path("gs://bpd-test/check")
    for job in ("copy", "1.5b"):
        about = {"part": "plain", "device": "d", "job": job}
        results.append(folder, about)
    assert [row["job"] for row in results.read(folder)] == ["copy", "1.5b"]


def test_damaged_results_are_named(tmp_path):
    write(tmp_path, "plain", a={})
    with (tmp_path / results.FILE).open("a") as stream:
        stream.write('{"part": "plain"}\n')
    with pytest.raises(UserError, match=r"line 2 of .* is not a result"):
        results.read(tmp_path)


@pytest.mark.exhaustive
def test_the_notebook_runs(tmp_path):
    """Its cells run in order; installation finds everything installed."""
    notebook = json.loads((ROOT / "docs/tutorials/accelerator.ipynb").read_text())
    program = "import subprocess\n"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            for line in "".join(cell["source"]).splitlines():
                indent, mark, command = line.partition("!")
                if mark and not indent.strip():
                    run = f"subprocess.run(f{command!r}, shell=True, check=True)"
                    line = indent + run
                program += f"{line}\n"
    for old, new in {
        "max_new_tokens=48": "max_new_tokens=12",
        "Why do the seasons change?": "w5 w6 w7",
        "--output=results": f"--output={tmp_path}",
        'Path("results")': f"Path({str(tmp_path)!r})",
    }.items():
        assert old in program
        program = program.replace(old, new)
    result = python(
        "-c",
        program,
        BPD_JAX_REPOSITORY=str(ROOT),
        BPD_JAX_MODEL=str(GOLDEN),
        BPD_JAX_FLAGS=" ".join([*SMALL, "--part=plain"]),
        PATH=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the same text as plain decoding: True" in result.stdout
    assert "| 7B, 1, BPD |" in result.stdout
    assert {row["part"] for row in results.read(tmp_path)} == {"plain"}
