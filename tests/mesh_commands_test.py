"""`evaluate` on meshes of eight devices, from the command line, against one device."""

import json

import pytest

from tests.commands import call
from tests.decoding.meshes_test import MESHES

METHODS = (
    "bpd",
    "heads/tree:6",
    "heads/tree:6+lookup:3",
    "ngram:1",
    "ngram:16",
    "ngram_fst:3",
    "ngram_viterbi:4",
    "ngram_device:3:adaptive=1",
    "neural:1",
    "heads+neural/best:3",
    "lookahead:3:order=3",
    "oracle",
)
PROMPTS = [f"{n} times {7 * n % 11}{' is' * (n % 2)}" for n in range(16)]


@pytest.fixture(scope="module")
def records_of(trained, tmp_path_factory):
    """Writes the records of all methods, by method and prompt."""
    folder = tmp_path_factory.mktemp("evaluations")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    command = [
        *(f"--model={trained / 'run'}", f"--rescorer={trained / 'plain'}"),
        *(f"--prompts_file={prompts}", f"--methods={','.join(METHODS)}"),
        "--max_new_tokens=12",
    ]

    def run(name, *flags):
        output = folder / name
        done = call("bpd_jax.evaluate", *command, *flags, f"--output={output}")
        assert done.returncode == 0, done.stderr
        lines = (output / "records.jsonl").read_text().splitlines()
        found = {}
        for each in map(json.loads, lines):
            of = each["method"], each["prompt_index"]
            found[of] = each["output_ids"], each["serial_calls"]
        assert len(found) >= len(METHODS) * len(PROMPTS)
        return done.stdout, found

    return run


@pytest.fixture(scope="module")
def on_one_device(records_of):
    _, records = records_of("one", "--batch_size=16")
    return records


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_texts_are_those_of_one_device(records_of, on_one_device, mesh, batch_size):
    sizes = dict(zip(("data", "fsdp", "model"), mesh, strict=True))
    flags = [f"--gin.MeshConfig.{axis}={size}" for axis, size in sizes.items()]
    name = "-".join(map(str, (*mesh, batch_size)))
    printed, records = records_of(name, f"--batch_size={batch_size}", *flags)
    shown = ", ".join(f"{axis} = {size}" for axis, size in sizes.items())
    assert f"mesh: {shown};" in printed
    assert records == on_one_device
