"""A contender of `benchmarks.llama_cpp`, in a process and an environment of its own.

    python benchmarks/llama_cpp_contender.py llama.cpp MODEL.gguf THREADS
    python benchmarks/llama_cpp_contender.py bpd_jax MODEL PRECISION DRAFTER

Writes a JSON line when it is ready. Then it reads requests, one JSON line each with
`prompt` (token ids), `tokens` (the most new ones) and `method`, and answers each with
its seconds, the number of new tokens and the text.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[int, str]]


def llama_cpp(path: str, threads: str) -> tuple[Answer, str]:
    """llama.cpp, through the wheel xllamacpp: one sequence, greedily."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 2048
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)

    def answer(request: dict[str, Any]) -> tuple[int, str]:
        result = server.handle_completions(
            {
                "prompt": request["prompt"],
                "n_predict": request["tokens"],
                "temperature": 0.0,
                "cache_prompt": False,
            }
        )
        return result["timings"]["predicted_n"], result["choices"][0]["text"]

    return answer, f"xllamacpp {xllamacpp.__version__}"


def bpd_jax(name: str, precision: str, drafter: str) -> tuple[Answer, str]:
    """bpd_jax; the method `default` is that of a command without `--method`."""
    import jax

    from bpd_jax import api
    from bpd_jax.base.compiled import keep_compiled

    keep_compiled()
    lm = api.load(name, precision=precision, drafter=drafter or None)
    ends = lm.end_of_text

    def answer(request: dict[str, Any]) -> tuple[int, str]:
        method = None if request["method"] == "default" else request["method"]
        [completion] = api.generate(
            lm,
            [request["prompt"]],
            method,
            max_new_tokens=request["tokens"],
            end_of_text=ends,
        )
        return len(completion.generation.output_ids), completion.text

    return answer, f"jax {jax.__version__}"


def memory() -> dict[str, float]:
    """Resident memory of this process now, and at most, in MB."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    names = {"memory_mb": "VmRSS", "most_memory_mb": "VmHWM"}
    return {key: int(fields[name].split()[0]) / 1e3 for key, name in names.items()}


def main() -> None:
    """Answers requests until there are none."""
    # Libraries write to the standard output too.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, *arguments = sys.argv[1:]
    answer, version = {"llama.cpp": llama_cpp, "bpd_jax": bpd_jax}[kind](*arguments)

    def write(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=results, flush=True)

    write({"version": version})
    for line in sys.stdin:
        start = time.perf_counter()
        tokens, text = answer(json.loads(line))
        seconds = time.perf_counter() - start
        write({"seconds": seconds, "tokens": tokens, "text": text, **memory()})


if __name__ == "__main__":
    main()
