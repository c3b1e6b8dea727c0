"""The accelerator benchmark, at the smallest sizes and on a CPU."""

import json
import pathlib
import shutil

import pytest

from benchmarks.accelerator_parts import results, shapes, smollm2
from benchmarks.accelerator_parts.jobs import JobSettings, random_decoder
from benchmarks.synthetic_ngrams import synthetic_model
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.drafting.assets import Assets
from tests.commands import ROOT, call, python
from tests.decoding.random_models import make_drafter, make_model, make_ngram

COMMAND = "benchmarks.accelerator"
GOLDEN = ROOT / "tests" / "pretrained" / "golden" / "llama"
SMALL = ("--tiny", "--platform=cpu", "--rounds=1", "--batch_sizes=2")
ABSENT = ["tensorflow", "tensorflow_datasets", "seqio", "pynini", "numba"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder of the results of all parts, where no heavy library can be imported."""
    folder = tmp_path_factory.mktemp("accelerator")
    prompts = folder / "prompts.txt"
    prompts.write_text("w5 w6 w7\nw8 w9\n")
    arguments = [
        "accelerator",
        *SMALL,
        f"--output={folder}",
        f"--model={GOLDEN}",
        f"--prompts_file={prompts}",
        "--lattice_width=4",
    ]
    program = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({ABSENT}))\n"
        f"sys.argv = {arguments}\n"
        "runpy.run_module('benchmarks.accelerator', run_name='__main__')\n"
    )
    result = python("-c", program)
    assert result.returncode == 0, result.stderr
    return folder


def rows_of(folder, part):
    [path] = folder.glob(f"accelerator_*_{part}.json")
    report = json.loads(path.read_text())
    assert report["part"] == part
    assert report["platform"] == "cpu"
    for row in report["rows"].values():
        assert row["tiny"]
        assert row["versions"]["jax"]
        assert row["date"]
        assert row["command"].startswith("python -m benchmarks.accelerator")
    return report["rows"]


def test_attention_kernels_are_compared_with_a_reference(measured):
    rows = rows_of(measured, "attention")
    kinds = "xla", "fused", "pallas", "cache"
    assert set(rows) == {f"tiny, {kind}" for kind in kinds}
    for row in rows.values():
        assert row["passed"]
        assert max(row["errors"].values()) < 1e-4
    assert len(rows["tiny, pallas"]["errors"]) == 4


def test_plain_decoding_is_compared_with_the_bandwidth_limit(measured):
    rows = rows_of(measured, "plain")
    bandwidth = rows["copy"]["bytes_per_second"]
    row = rows["smollm2_135m, batch 2"]
    assert row["bytes_per_second"] == bandwidth
    assert row["ms_floor"] == pytest.approx(1e3 * row["weights_bytes"] / bandwidth)
    # One layer: q and output 32 x 32, k and v 32 x 16, three times 32 x 64 in the MLP,
    # three norms, and the tied softmax of 64 tokens.
    weights = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 3 * 32 + 64 * 32
    assert row["weights_bytes"] == 4 * weights


def test_shapes_report_forward_passes_and_drafting(measured):
    rows = rows_of(measured, "shapes")
    assert list(rows["blockwise_1b5, batch 2, passes"]["ms_by_tokens"]) == ["1", "4"]
    drafting = [row["ms_drafting"] for row in rows.values() if "ms_drafting" in row]
    assert len(drafting) == 3
    assert min(drafting) > 0


def test_missing_flag_skips_existing_results(measured, tmp_path):
    shutil.copytree(measured, tmp_path / "copy")
    flags = *SMALL, "--part=shapes", "--missing", f"--output={tmp_path / 'copy'}"
    result = call(COMMAND, *flags)
    assert result.returncode == 0, result.stderr
    assert rows_of(tmp_path / "copy", "shapes") == rows_of(measured, "shapes")


def test_a_training_step_is_timed(measured):
    [row] = rows_of(measured, "training").values()
    assert row["tokens_per_second"] > 0
    assert row["planned_bytes_per_device"] > 0
    assert row["mfu"] is None  # the peak FLOP/s of a CPU is unknown


def test_methods_are_compared_with_plain_decoding(measured):
    rows = rows_of(measured, "smollm2")
    methods = rows["llama, batch 2"]["methods"]
    # The other methods need heads, a drafter or n-grams, which the model lacks.
    assert list(methods) == ["greedy", "prompt_lookup:8"]
    assert methods["greedy"]["speedup"] == 1
    for row in methods.values():
        assert row["tokens_per_call"] >= 1
        assert row["texts_that_differ"] == 0


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


def test_every_method_of_the_shapes_can_be_built():
    """The tests above measure only a few of them."""
    settings = JobSettings(tiny=True, rounds=1, batch_sizes=(1,))
    for name in shapes.MODELS:
        config = settings.model(name)
        ngram = synthetic_model(500, config.trunk.vocab_size)
        decoder = random_decoder(config, ngram)
        for method in map(parse_method, shapes.METHODS):
            assert decoder.drafter(method).on_device


def test_invalid_flags_are_refused(tmp_path):
    output = f"--output={tmp_path}"
    for flags, message in {
        ("--part=speed",): "--part=speed is unknown: choose from attention",
        ("--platform=tpu",): "jax has no tpu here, only cpu",
        ("--rounds=0",): "must be 1 or more",
        ("--part=smollm2", "--tiny", f"--weights={tmp_path}"): "parts.json",
        ("--part=smollm2", "--weights=x", f"--model={GOLDEN}"): "--weights is for",
    }.items():
        result = call(COMMAND, output, *flags)
        assert result.returncode == 1
        assert message in result.stderr
        assert "Traceback" not in result.stderr


def test_no_job_starts_after_the_time_limit(tmp_path):
    result = call(
        COMMAND, *SMALL, "--part=plain", "--minutes=0", f"--output={tmp_path}"
    )
    assert result.returncode == 0, result.stderr
    assert "no time for: plain" in result.stdout
    assert not list(tmp_path.iterdir())


def row(**figures):
    return {"date": "2026-01-02", "versions": {"jax": "1"}, "command": "c", **figures}


def write(folder, part, platform="gpu", **rows):
    report = {"part": part, "device": "Fast X1", "platform": platform, "rows": rows}
    path = results.path_of(folder, f"Fast X1 {platform}", part)
    path.write_text(json.dumps(report))
    return path


def test_tables_are_generated_from_the_result_files(tmp_path):
    assert results.tables(tmp_path).startswith("Nothing has been measured")
    plain = row(ms_per_call=2.0, ms_floor=1.0, times_floor=2.0, tokens_per_second=500.0)
    write(tmp_path, "plain", a=plain, b=row(failed="no room"))
    passes = row(ms_by_tokens={"1": 1.25, "8": 1.5})
    write(tmp_path, "shapes", **{"m, passes": passes, "m, bpd": row(ms_drafting=0.5)})
    step = row(tokens_per_second=1e5, mfu=0.4, planned_bytes_per_device=25e9)
    write(tmp_path, "training", step=step)
    kernel = row(errors={"output": 0.5}, passed=False, ms_forward=3.0)
    write(tmp_path, "attention", kernel=kernel)
    write(tmp_path, "smollm2", platform="cpu")
    text = results.tables(tmp_path)
    assert text.count("### Fast X1") == 1
    for line in (
        "| a | 2 | 1 | 2.00 | 500 |",
        "| b | failed: no room |  |  |  |",
        "| m | 1.25 | 1.5 |",
        "| drafting, m, bpd | 0.5 |  |",
        "| step | 100,000 | 40 % | 25.0 |",
        "| kernel | 0.5 | **no** | 3 |",
    ):
        assert line in text.splitlines()
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nb\n")
    results.update_page(page, tmp_path)
    new = page.read_text()
    assert text in new
    assert "old" not in new
    assert new.startswith("a\n")
    assert new.endswith("\nb\n")
    page.write_text("no marks")
    with pytest.raises(UserError, match="add them"):
        results.update_page(page, tmp_path)


def test_docs_page_contains_the_tables_of_the_committed_results():
    assert results.tables(ROOT / results.FOLDER) in (ROOT / results.PAGE).read_text()


def test_damaged_results_are_named(tmp_path):
    path = tmp_path / "accelerator_x_plain.json"
    path.write_text("{}")
    with pytest.raises(UserError, match="move it away"):
        results.read(pathlib.Path(path))
