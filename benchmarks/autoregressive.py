"""Plain greedy decoding against Hugging Face transformers, on the same weights.

    python -m benchmarks.autoregressive --python=HF/bin/python

where HF is an environment with torch and transformers (`pip install torch
transformers`). A model of GPT-2's shape with random weights decodes the same prompts
in both, float32, on all cores; the texts must be equal. The two take turns over
`--rounds`, so that their ratio holds on a noisy machine. A token's time is that of all
tokens but the first, so the prompt does not count. Beside it stands the floor of any
implementation: the time that reading the weights once takes. The file also says what a
pass over M draft tokens costs relative to a pass over one, which decides whether
drafting pays.

Run it on an idle machine: torch's threads wait for each other after every product, so
whatever else runs slows torch far more than XLA. The file keeps the load average.
"""

import contextlib
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.timing import read_bandwidth, seconds_of
from bpd_jax import cli, files, provenance
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.methods import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.typing import Array, Params

PYTHON = flags.DEFINE_string("python", "", "interpreter with torch and transformers.")
LAYERS = flags.DEFINE_integer("layers", 12, "transformer blocks.")
WIDTH = flags.DEFINE_integer("width", 768, "D; heads are 64 wide, d_ff is 4 D.")
VOCABULARY = flags.DEFINE_integer("vocabulary", 50257, "tokens.")
PROMPT_TOKENS = flags.DEFINE_list(
    "prompt_tokens", ["32", "768"], "tokens of each prompt."
)
NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "tokens decoded in each round.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "times that each decodes every prompt.")
DRAFTS = flags.DEFINE_list(
    "drafts",
    ["1", "2", "4", "8", "16", "32", "64"],
    "M, tokens of the timed passes.",
)
OUTPUT = flags.DEFINE_string(
    "output", "benchmarks/results/autoregressive_cpu.json", "file."
)

_SCRIPT = pathlib.Path(__file__).with_name("autoregressive_transformers.py")


def gpt2_config() -> BlockwiseConfig:
    """A plain model of GPT-2's shape."""
    width = WIDTH.value
    return BlockwiseConfig(
        TransformerConfig(
            vocab_size=VOCABULARY.value,
            num_layers=LAYERS.value,
            d_model=width,
            d_ff=4 * width,
            num_heads=width // 64,
            max_length=1024,
        )
    )


def random_parameters(config: BlockwiseConfig, seed: int) -> Params:
    """Random weights, such that the text does not soon repeat itself."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        values = rng.standard_normal(leaf.shape, np.float32)
        name = path[-1].key
        if name != "kernel":
            return values * 0.1 + (name == "scale")
        # Sharp attention: what is attended to changes from token to token.
        gain = 3 if path[-2].key in ("query", "key") else 1
        return values * (gain * config.trunk.d_model**-0.5)

    return jax.tree_util.tree_map_with_path(draw, parameter_shapes(config))


@contextlib.contextmanager
def transformers_process(
    python: str, params: Params
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Starts transformers on the same weights; yields how to ask it."""
    with tempfile.TemporaryDirectory() as folder:
        weights = pathlib.Path(folder) / "weights.npz"
        arrays = {
            "/".join(entry.key for entry in path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        }
        np.savez(weights, **arrays)
        try:
            process = subprocess.Popen(
                [python, str(_SCRIPT), str(weights)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise UserError(f"--python={python} does not start: {error}.") from None
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(**request: Any) -> dict[str, Any]:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise UserError(
                    f"--python={python} stopped: it needs torch and transformers "
                    "(see its message above)."
                )
            return json.loads(line)

        try:
            yield ask
        finally:
            process.communicate()


@functools.partial(jax.jit, static_argnames=("model", "length"))
def _one_pass(
    model: ModelFunctions, params: Params, token: Array, cache: Any, *, length: int
) -> Array:
    tokens = jnp.broadcast_to(token, (1, length))
    positions = cache.lengths[:, None] + jnp.arange(length)
    mask = causal_mask(jnp.ones_like(tokens))
    hidden, new, _ = model.forward(params, tokens, positions, mask, cache)
    return model.next_token_logits(params, hidden).argmax(-1), new


def pass_costs(
    model: ModelFunctions, params: Params, slots: int
) -> dict[int, dict[str, float]]:
    """Median milliseconds of a pass over M tokens and its softmax; M = 1 is 1."""
    cache = model.empty_cache(1, slots)
    cache = cache.replace(lengths=jnp.full((1,), slots - 2 * NEW_TOKENS.value))
    lengths = whole_numbers("drafts")
    times: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(ROUNDS.value):
        for length in lengths:
            run = functools.partial(
                _one_pass, model, params, jnp.int32(7), cache, length=length
            )
            times[length] += seconds_of(run, 5)
    medians = {length: 1e3 * statistics.median(t) for length, t in times.items()}
    base = medians[min(medians)]
    return {m: {"ms": ms, "relative": ms / base} for m, ms in medians.items()}


def whole_numbers(flag: str) -> tuple[int, ...]:
    """The numbers of a list flag that must be given."""
    numbers = cli.whole_numbers(flag)
    if not numbers:
        raise UserError(f"--{flag} is empty: give one number or more.")
    return numbers


Run = Callable[[np.ndarray, int], tuple[float, list[int]]]


def greedy_costs(runs: dict[str, Run], length: int) -> dict[str, Any]:
    """Milliseconds per token of every run after the same prompt, which they take turns
    to decode; checks that the texts are equal."""
    prompt = np.random.default_rng(length).integers(
        VOCABULARY.value, size=length, dtype=np.int32
    )
    count = NEW_TOKENS.value
    text = runs["bpd_jax"](prompt, count)[1]
    costs: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS.value):
        for name, run in runs.items():
            first, _ = run(prompt, 1)
            seconds, tokens = run(prompt, count)
            if tokens != text:
                raise UserError(f"{name} and bpd_jax decode different texts.")
            costs[name].append(1e3 * (seconds - first) / (count - 1))
    return {
        "different_tokens_in_text": len(set(text)),
        "ms_per_token": {
            name: {
                "median": statistics.median(values),
                "fastest": min(values),
                "slowest": max(values),
                # Within each round, so that a slow moment of the machine cancels.
                "bpd_jax_takes": statistics.median(
                    ours / theirs
                    for ours, theirs in zip(costs["bpd_jax"], values, strict=True)
                ),
            }
            for name, values in costs.items()
        },
    }


def main() -> None:
    """Measures, prints, writes."""
    python = cli.required("python")
    load = os.getloadavg()[0]
    config = gpt2_config()
    host_params = random_parameters(config, seed=0)
    params = jax.device_put(host_params)
    model = ModelFunctions(config)
    decoder = Decoder(model, params)
    prompts = whole_numbers("prompt_tokens")

    def ours(prompt: np.ndarray, count: int) -> tuple[float, list[int]]:
        options = DecodeOptions(max_new_tokens=count, batch_size=1)
        (generation,) = decoder.decode(parse_method("greedy"), [prompt], options)
        return generation.seconds, generation.output_ids.tolist()

    with transformers_process(python, host_params) as ask:

        def theirs(way: str, prompt: np.ndarray, count: int) -> tuple[float, list[int]]:
            answer = ask(way=way, prompt=prompt.tolist(), new_tokens=count)
            return answer["seconds"], answer["tokens"]

        runs: dict[str, Run] = {
            "bpd_jax": ours,
            "transformers_generate": functools.partial(theirs, "generate"),
            "transformers_forward": functools.partial(theirs, "forward"),
        }
        greedy = {length: greedy_costs(runs, length) for length in prompts}
        versions = provenance.versions() | ask(way="versions")

    speed = read_bandwidth()
    # Of the position table only one row is read.
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    read -= params["trunk"]["position_embedding"].nbytes
    result = {
        "command": " ".join(["python -m benchmarks.autoregressive", *sys.argv[1:]]),
        "date": provenance.today(),
        "device": provenance.device(),
        "load_average": {"before": load, "after": os.getloadavg()[0]},
        "versions": versions,
        "new_tokens": NEW_TOKENS.value,
        "weights_bytes": read,
        "bytes_per_second": speed,
        "floor_ms_per_token": 1e3 * read / speed,
        "greedy_after_prompt_of": greedy,
        "pass_over": {
            length: pass_costs(model, params, length + 2 * NEW_TOKENS.value)
            for length in prompts
        },
    }
    shown = json.dumps(result, indent=2, ensure_ascii=False)
    with files.replacing_file(pathlib.Path(OUTPUT.value)) as temporary:
        temporary.write_text(shown + "\n", encoding="utf-8")
    print(shown)


if __name__ == "__main__":
    cli.run(main)
