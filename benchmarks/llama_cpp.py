"""bpd_jax against llama.cpp on the same GGUF file, in one run.

    python3 -m venv llama && llama/bin/pip install xllamacpp
    python -m benchmarks.llama_cpp --llama_python=llama/bin/python --threads=2

Every contender is a process that has loaded its model: llama.cpp with the file as it is
and with its weights expanded to F32, bpd_jax in each precision. They answer the same
prompts in turn, one at a time, once to warm up and then in rounds, up to a number of
new tokens and up to one, so that the rate without the prompt can be told, and texts are
compared with those of llama.cpp in F32. Writes one JSON file with device, date and
versions.
"""

import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import gguf
import numpy as np
from absl import flags

from benchmarks import records
from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError
from bpd_jax.data.text_readers import read_prompts_file
from bpd_jax.decoding.loading import PACKAGED, find_packaged, load_model

MODEL = cli.DEFINE_path("model", "smollm2", "known name or GGUF file.")
LLAMA_PYTHON = cli.DEFINE_path(
    "llama_python", None, "Python of an environment with the package xllamacpp."
)
PRECISIONS = flags.DEFINE_list(
    "precisions", ["float32", "int8"], "precisions of bpd_jax."
)
METHODS = flags.DEFINE_list(
    "methods", ["greedy", "default"], "methods of bpd_jax; default: without --method."
)
PROMPTS_FILE = cli.DEFINE_path(
    "prompts_file",
    "experiments/smollm2/prompts.txt",
    "one prompt per line, or JSON Lines with the field prompt.",
)
PROMPTS = flags.DEFINE_integer("prompts", 8, "number of prompts.", 1)
TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "most new tokens.", 2)
ROUNDS = flags.DEFINE_integer("rounds", 3, "timed rounds.", 1)
THREADS = flags.DEFINE_integer("threads", os.cpu_count(), "threads of llama.cpp.", 1)
DRAFTER = cli.DEFINE_path("drafter", None, "folder of a block drafter of bpd_jax.")
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/llama_cpp.json", "file.")

_WORKER = pathlib.Path(__file__).with_name("llama_cpp_contender.py")


def write_expanded(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a GGUF file with all tensors in F32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        own = field.name.startswith("GGUF.") or field.name == "general.architecture"
        if own or field.name == "general.file_type":
            continue
        kind = field.types[0]
        of_parts = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=of_parts)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Contender:
    """A process that decodes, and what it has measured."""

    def __init__(self, name: str, python: str, *arguments: str) -> None:
        self.name = name
        start = time.perf_counter()
        command = [python, str(_WORKER), *arguments]
        self._command = " ".join(command)
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise UserError(f"cannot start {python}: {error.strerror}.") from error
        self.version = self._read()["version"]
        self.start_seconds = time.perf_counter() - start

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"{self.name} ended early: run `{self._command}` alone.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, prompt: list[int], tokens: int, method: str) -> dict[str, Any]:
        """Decodes a prompt."""
        assert self._process.stdin is not None
        request = {"prompt": prompt, "tokens": tokens, "method": method}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def contenders(path: pathlib.Path, folder: pathlib.Path) -> list[Contender]:
    """Starts all processes, one after the other."""
    started = []
    threads = str(THREADS.value)
    if LLAMA_PYTHON.value:
        large = folder / "float32.gguf"
        write_expanded(path, large)
        for name, file in (("stored", path), ("F32", large)):
            arguments = LLAMA_PYTHON.value, "llama.cpp", str(file), threads
            started.append(Contender(f"llama.cpp, {name}", *arguments))
    for precision in PRECISIONS.value:
        arguments = "bpd_jax", MODEL.value, precision, DRAFTER.value or ""
        started.append(Contender(f"bpd_jax, {precision}", sys.executable, *arguments))
    return started


def measure(
    started: list[Contender], prompts: list[list[int]]
) -> dict[str, dict[str, Any]]:
    """Rounds in which every contender answers every prompt by its methods."""
    runs = [
        (contender, method)
        for contender in started
        for method in (
            METHODS.value if contender.name.startswith("bpd_jax") else ["greedy"]
        )
    ]
    lists = ("seconds", "prompt_seconds", "tokens", "texts")
    results: dict[str, dict[str, Any]] = {
        f"{contender.name}, {method}": {name: [] for name in lists}
        for contender, method in runs
    }
    answers = list(itertools.product(range(1 + ROUNDS.value), prompts, runs))
    for number, prompt, (contender, method) in progress.bar(answers, label="answers"):
        first = contender.ask(prompt, 1, method)
        whole = contender.ask(prompt, TOKENS.value, method)
        if not number:
            continue
        result = results[f"{contender.name}, {method}"]
        result["seconds"].append(whole["seconds"])
        result["prompt_seconds"].append(first["seconds"])
        result["tokens"].append(whole["tokens"])
        result["memory_mb"] = whole["memory_mb"]
        result["most_memory_mb"] = whole["most_memory_mb"]
        if number == 1:
            result["texts"].append(whole["text"])
    return results


def main() -> None:
    """Measures, prints and writes the results."""
    name = MODEL.value
    path = find_packaged(name) if name in PACKAGED else pathlib.Path(name)
    if not path.is_file():
        raise UserError(f"{path} is not a GGUF file.")
    texts = read_prompts_file(PROMPTS_FILE.value)[: PROMPTS.value]
    loaded = load_model(name, stored=True)
    prompts = [loaded.encode_prompt(text).tolist() for text in texts]
    del loaded
    with tempfile.TemporaryDirectory() as folder:
        started = contenders(path, pathlib.Path(folder))
        runs = len(prompts) * (1 + ROUNDS.value)
        results = measure(started, prompts)
        for contender in started:
            contender.close()
    expanded = results.get("llama.cpp, F32, greedy")
    for result in results.values():
        if expanded:
            pairs = zip(result["texts"], expanded["texts"], strict=True)
            result["texts_as_in_f32"] = sum(text == other for text, other in pairs)
        result["first_token_seconds"] = statistics.median(result["prompt_seconds"])
        tokens, seconds = sum(result["tokens"]), sum(result["seconds"])
        later = tokens - len(result["tokens"])
        result["tokens_per_second"] = tokens / seconds
        result["without_prompt"] = later / (seconds - sum(result["prompt_seconds"]))
    records.write(
        OUTPUT.value,
        {
            **records.about("llama_cpp"),
            "model": path.name,
            "threads": THREADS.value,
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "max_new_tokens": TOKENS.value,
            "rounds": ROUNDS.value,
            "start_seconds": {c.name: c.start_seconds for c in started},
            "contender_versions": {c.name: c.version for c in started},
            "results": results,
        },
    )
    print(
        f"{runs} answers; tokens per second with and without the prompt, seconds to "
        "the first token, MB at most, texts as those of llama.cpp in F32:"
    )
    for name, result in results.items():
        print(
            f"{name:28}{result['tokens_per_second']:8.1f}"
            f"{result['without_prompt']:8.1f}{result['first_token_seconds']:8.2f}"
            f"{result['most_memory_mb']:8.0f}{result.get('texts_as_in_f32', '-'):>8}"
        )


if __name__ == "__main__":
    cli.run(main)
