"""Commands that two processes of four devices run together, against one process."""

import json
import re

import pytest

from bpd_jax.data.generations import open_generations
from bpd_jax.studies.run_files import open_run
from tests import commands
from tests.commands import ROOT, succeed
from tests.experiments.small_studies import bindings

MESH = ["--gin.MeshConfig.data=4", "--gin.MeshConfig.model=2"]

# What the library between processes prints to standard output, in pieces.
BETWEEN = re.compile(
    r"\[Gloo\]|Rank|is|connected|to|peer|ranks|Expected|number|of|[0-9:.\s]"
)


def on_two(folder, module, *arguments):
    """Runs a command in two processes; process 1 prints nothing."""

    def flags(address, index):
        joined = f"--coordinator_address={address}", "--num_processes=2"
        return *arguments, *MESH, *joined, f"--process_id={index}"

    file = ROOT / f"{module.replace('.', '/')}.py"
    first, second = commands.on_two(file, flags, folder)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert not BETWEEN.sub("", second.stdout)
    return first.stdout


@pytest.fixture(scope="module")
def model(trained):
    return [f"--model={trained / 'run'}", "--max_new_tokens=12"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["4 times 2", "3", "11 times 10 is", "0 times", "7 times 7 i"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return f"--prompts_file={path}"


@pytest.mark.exhaustive
def test_evaluate(model, prompts, tmp_path):
    options = [*model, "--methods=bpd,ngram:4,auto", "--batch_size=2", prompts]
    one, two = tmp_path / "one", tmp_path / "two"
    succeed("bpd_jax.evaluate", *options, f"--output={one}")
    printed = on_two(tmp_path, "bpd_jax.evaluate", *options, f"--output={two}")
    assert "Fastest: " in printed
    columns = ("method", "prompt_index", "text", "output_ids", "serial_calls")
    records = [
        [
            [json.loads(line)[column] for column in columns]
            for line in (folder / "records.jsonl").read_text().splitlines()
        ]
        for folder in (one, two)
    ]
    assert len(records[0]) == 3 * 5
    assert records[0] == records[1]


def test_distill_resumes_with_another_number_of_processes(model, prompts, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    options = [*model, "--batch_size=3", "--nochat", f"--states={tmp_path / 'states'}"]
    succeed("bpd_jax.distill", *options[:-1], prompts, f"--output={one}")
    on_two(tmp_path, "bpd_jax.distill", *options, prompts, f"--output={two}")
    texts = [open_generations(folder) for folder in (one, two)]
    by_prompt = [
        {int(t.indices[row]): t[row].tolist() for row in range(len(t))} for t in texts
    ]
    assert len(by_prompt[0]) == 5
    assert by_prompt[0] == by_prompt[1]
    printed = succeed("bpd_jax.distill", *options, prompts, f"--output={two}")
    assert "5 of 5 texts exist already" in printed.stdout


@pytest.mark.exhaustive
def test_a_study(trained, tmp_path):
    options = [*bindings(trained), "--gin.StudyConfig.contenders=['bpd', 'ngram:2']"]
    records = []
    for name in ("one", "two"):
        folder = tmp_path / name
        command = ["experiments.run", "table4", *options, f"--workdir={folder}"]
        command.append("--limit=2")
        if name == "one":
            succeed(*command)
        else:
            assert "results: " in on_two(tmp_path, *command)
        records.append(open_run(folder / "table4").records)
    assert records[0] == records[1] != []
