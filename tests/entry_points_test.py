"""decode and evaluate on a model trained here, as a user calls them."""

import json
import re
import shutil

import pytest

from bpd_jax.decoding.method_text import describe_methods
from tests.commands import assert_all_refused, succeed_all

FIELDS = (
    *("prompt", "input_ids", "output_ids", "text"),
    *("serial_calls", "block_efficiency", "seconds"),
)


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    """A copy for this module, of `run` and `plain`."""
    folder = tmp_path_factory.mktemp("entry")
    for name in ("run", "plain"):
        shutil.copytree(trained / name, folder / name)
    return folder


def decode(folder, *commands):
    """Results of `decode`, which succeeds with each list of arguments."""
    return succeed_all("bpd_jax.decode", *commands, folder=folder)


def test_decode_writes_json_lines_in_prompt_order(folder):
    (folder / "prompts.jsonl").write_text(
        '{"prompt": "3 times"}\n{"prompt": "7 times 2 is"}\n{"prompt": "5"}\n'
    )
    methods = {
        "greedy": ["--method=greedy"],
        "arrays": ["--method=ngram:4"],
        "arpa": ["--method=ngram:4", "--ngram=run/ngram/model.arpa.gz"],
        "sampled": ["--method=ngram:4", "--temperature=0.9"],
    }
    base = ["--model=run", "--prompts_file=prompts.jsonl"]
    base += ["--max_new_tokens=16", "--batch_size=2"]
    commands = [
        [*base, *flags, f"--output={name}.jsonl"] for name, flags in methods.items()
    ]
    outputs = {}
    for name, result in zip(methods, decode(folder, *commands), strict=True):
        assert "tokens per call" in result.stdout
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [tuple(record) for record in records] == [FIELDS] * 3
        prompts = [record["prompt"] for record in records]
        assert prompts == ["3 times", "7 times 2 is", "5"]
        for record in records:
            efficiency = len(record["output_ids"]) / record["serial_calls"]
            assert record["block_efficiency"] == pytest.approx(efficiency)
        outputs[name] = [record["output_ids"] for record in records]
    plain = outputs["greedy"]
    assert outputs["arrays"] == outputs["arpa"] == plain
    assert outputs["sampled"] != plain


@pytest.fixture(scope="module")
def evaluations(folder):
    """Results of `evaluate` with and without timing, in one process."""
    # The same shapes, so that programs are compiled once.
    common = ["--model=run", "--prompt_tokens=8", "--num_prompts=3"]
    common += ["--max_new_tokens=24", "--lattice_width=8"]
    compared = ["--methods=bpd,ngram:4,oracle"]
    timed = ["--methods=bpd,ngram:4,auto", "--show=ngram:4", "--rounds=2"]
    timed += ["--output=timed"]
    commands = [[*common, *compared], [*common, *timed]]
    return succeed_all("bpd_jax.evaluate", *commands, folder=folder)


def test_evaluate_proves_equality_and_writes_a_report(folder, evaluations):
    result = evaluations[0]
    assert result.stdout.count("identical") >= 3
    output = folder / "run" / "evaluation"
    report = json.loads((output / "report.json").read_text())
    efficiency = {m["name"]: m["block_efficiency"] for m in report["methods"]}
    assert [*efficiency] == ["greedy", "bpd", "ngram:4", "oracle"]
    assert efficiency["greedy"] == 1
    assert efficiency["oracle"] == max(efficiency.values()) > 1
    lines = (output / "records.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 3
    assert "4-best 3-gram" in (output / "report.html").read_text()
    # Drafts have their own table.
    assert "neighbours" in result.stdout
    assert report["methods"][2]["nodes"] > report["methods"][1]["nodes"] == 4


def test_evaluate_streams_an_answer_and_alternates_methods(folder, evaluations):
    result = evaluations[1]
    answered = result.stdout.index("ngram:4: 24 tokens in ")
    assert answered < result.stdout.index("Speed-")
    report = json.loads((folder / "timed" / "report.json").read_text())
    assert report["methods"][0]["speedup"] == 1
    # Nothing was tuned: auto marks the fastest of the table.
    [automatic] = [method for method in report["methods"] if method["automatic"]]
    assert automatic == max(report["methods"], key=lambda method: method["speedup"])
    assert report["settings"]["rounds"] == 2
    assert result.stdout.splitlines()[-1].startswith("Fastest: ")


def test_invalid_input_is_refused_and_leaves_no_files(folder):
    base = ["--model=run", "--output=never.jsonl", "--max_new_tokens=8"]
    prompt = [*base, "--prompt=x"]
    cases = [
        (base, "exactly one of --prompt and --prompts_file"),
        ([*prompt, "--ngram=nowhere", "--method=ngram"], "nowhere"),
        ([*prompt, "--model=nowhere", "--output=run"], "it is a folder; name a file"),
        ([*prompt, "--gin.MeshConfig.model=3"], "MeshConfig asks for"),
        (
            [*prompt, f"--max_new_tokens={'9' * 5000}"],
            "--max_new_tokens must be a positive integer, not ",
        ),
    ]
    assert_all_refused("bpd_jax.decode", cases, folder)
    assert not (folder / "never.jsonl").exists()
    cases = [
        ([], "no model 'nowhere"),
        (["--methods=auto"], "has no methods to choose from"),
        (["--rounds=0"], "positive integer"),
    ]
    cases = [(["--model=nowhere", *flags], message) for flags, message in cases]
    assert_all_refused("bpd_jax.evaluate", cases, folder)


def test_help_lists_the_methods_without_a_model(folder):
    [result] = decode(folder, ["--method=help"])
    assert result.stdout.strip() == describe_methods()


def test_the_answer_to_a_single_prompt_is_streamed(folder):
    (folder / "one.txt").write_text("3 times\n")
    base = ["--model=run", "--max_new_tokens=16", "--method=ngram:4"]
    prompt = "--prompt=3 times"
    streamed, steps, of_file, written = decode(
        folder,
        [*base, prompt],
        [*base, prompt, "--show_steps"],
        [*base, "--prompts_file=one.txt"],
        [*base, prompt, "--output=one.jsonl"],
    )
    [record] = [json.loads(line) for line in (folder / "one.jsonl").open()]
    summary = re.compile(r"^ngram:4: \d+ tokens per second, .* \(16 tokens, ", re.M)
    for result in (streamed, steps, of_file):
        assert result.stdout.startswith(f"3 times{record['text']}\n")
    assert summary.search(streamed.stdout)
    assert f"ngram:4, prompt 1: 16 tokens in {record['serial_calls']}" in steps.stdout
    assert summary.match(written.stdout)
    assert written.stdout.endswith("; written to one.jsonl\n")


def test_sampling_stop_texts_and_gin(folder):
    base = ["--model=run", "--max_new_tokens=16"]
    prompt = "--prompt=3 times 4 is"
    sampling = ["--temperature=0.8", "--top_p=0.9", "--seed=5"]
    gin = [
        "--gin_file=gin_configs/runs/decode.gin",
        "--gin.METHOD='medusa:8'",
        "--gin.DecodeOptions.max_new_tokens=6",
    ]
    results = decode(
        folder,
        [*base, prompt, "--method=greedy"],
        [*base, prompt, "--stop=.", "--stop=times 9"],
        [*base, prompt, "--method=medusa:8", "--acceptance=typical", *sampling],
        [*base, prompt, *gin],
    )
    complete, stopped, typical, by_gin = (r.stdout for r in results)
    text = complete.removesuffix(complete[complete.rindex("greedy: ") :]).rstrip("\n")
    assert "." in text
    assert stopped.startswith(text[: text.index(".")] + "\n")
    assert "(typical acceptance: LOSSY)" in typical
    # A flag on the command line, max_new_tokens, overrides the gin file.
    assert by_gin.startswith(text)
    assert re.search(r"^medusa:8: .* \(16 tokens, ", by_gin, re.M)


def test_auto_reports_the_chosen_method_and_its_speed(folder):
    """A model without heads has few methods to choose from."""
    base = ["--model=plain", "--prompt=1 2 1 2 1 2", "--max_new_tokens=8"]
    [result] = decode(folder, [*base, "--method=auto"])
    assert re.match(r"auto: (greedy: no method is|lookup:\d, \S+ times)", result.stdout)
    assert re.search(r"^(greedy|lookup:\d): .* \(8 tokens, ", result.stdout, re.M)
