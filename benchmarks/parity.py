"""Compares an imported model with Hugging Face transformers.

    python -m benchmarks.parity --model=smollm2 --golden=greedy.jsonl.gz

Each line of the golden file has the results of transformers for a prompt, in float32:
`input_ids`, `greedy_ids`, `last_logits_top5_ids` and `last_logits_top5` (raw logits
after the prompt), `prompt_mean_nll` (nats per token). Prints and writes the largest
differences and, where greedy texts differ, the difference of the two tokens' logits.
"""

import gzip
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.decoding.compare import first_difference
from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation import decode_flags
from bpd_jax.models.model import Model
from bpd_jax.models.segment_attention import Segments

GOLDEN = cli.DEFINE_path("golden", None, "Results of transformers.")
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/parity.json", "file.")

_PADDING, _TOGETHER = 256, 13


def main() -> None:
    """Compares all prompts; prints and writes the results."""
    loaded, decoder, _ = decode_flags.load(decode_flags.config())
    golden = read(cli.required("golden"))
    model = loaded.model
    # Sorted by length, so that few shapes are compiled.
    golden.sort(key=lambda record: len(record["input_ids"]))
    prompts = [np.asarray(record["input_ids"], np.int32) for record in golden]
    longest = max(len(record["greedy_ids"]) for record in golden)
    options = DecodeOptions(
        max_new_tokens=longest, end_of_text=loaded.end_of_text, batch_size=_TOGETHER
    )
    rows = []
    texts: list[Generation] = []
    with progress.bar(label="decoding", total=len(golden), unit=" prompts") as bar:
        for first in range(0, len(prompts), _TOGETHER):
            group = prompts[first : first + _TOGETHER]
            texts += decoder.decode(GREEDY, group, options)
            bar.update(len(group))
    with progress.bar(label="comparing", total=len(golden), unit=" prompts") as bar:
        for record, prompt, text in zip(golden, prompts, texts, strict=True):
            logits = prompt_logits(model, prompt)
            theirs = np.asarray(record["last_logits_top5"])
            last = logits[-1][record["last_logits_top5_ids"]]
            log_probs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
            nll = -log_probs[np.arange(len(prompt) - 1), prompt[1:]].mean(
                dtype=np.float64
            )
            rows.append(
                {
                    "logits": float(np.abs(last - theirs).max()),
                    "nll": float(abs(nll - record["prompt_mean_nll"])),
                    **parting(model, text, record["greedy_ids"]),
                }
            )
            bar.update(1)
    partings = [row for row in rows if row["parts_at"] is not None]
    result = {
        **records.about("parity"),
        "prompts": len(rows),
        "largest_difference_of_last_logits": max(row["logits"] for row in rows),
        "largest_difference_of_mean_nll": max(row["nll"] for row in rows),
        "equal_texts": len(rows) - len(partings),
        "partings": partings,
    }
    records.write(OUTPUT.value, result)
    print(
        f"{len(rows)} prompts: last logits within "
        f"{result['largest_difference_of_last_logits']:.1e}, mean NLL within "
        f"{result['largest_difference_of_mean_nll']:.1e}, greedy texts equal on "
        f"{result['equal_texts']}"
    )
    for row in partings:
        print(f"  parts at token {row['parts_at'] + 1}, gap {row['gap']:.1e}")
    print(f"written to {OUTPUT.value}")


def read(path: str) -> list[dict[str, Any]]:
    """The records of the golden file."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            return [json.loads(line) for line in stream]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}.") from error


def prompt_logits(
    model: Model, tokens: Int[np.ndarray, " T"]
) -> Float[np.ndarray, "T V"]:
    """The model's logits after every token of a text."""
    padded = np.pad(tokens, (0, -len(tokens) % _PADDING))
    return np.asarray(_logits(model, jnp.asarray(padded)[None]))[: len(tokens)]


@jax.jit
def _logits(model: Model, tokens: Int[Array, "1 T"]) -> Float[Array, "T V"]:
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, *_ = model.forward(tokens, positions, Segments())
    return model.next_token_logits(hidden)[0]


def parting(model: Model, text: Generation, theirs: list[int]) -> dict[str, Any]:
    """First token that differs from the reference, and the gap of the logits."""
    ours = text.output_ids
    at = first_difference(ours, np.asarray(theirs))
    if at is None:
        return {"parts_at": None}
    if at == min(len(ours), len(theirs)):  # one text ends earlier
        return {"parts_at": at, "gap": float("inf")}
    read = np.concatenate([text.input_ids, ours[:at]])
    logits = prompt_logits(model, read)[-1]
    return {"parts_at": at, "gap": float(abs(logits[ours[at]] - logits[theirs[at]]))}


if __name__ == "__main__":
    cli.run(main)
