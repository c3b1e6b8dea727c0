"""What the gate of drafts loses: decoding with it, replayed for any time of a call.

    python -m benchmarks.gate --model=smollm2 --method=block/tree:4 \\
        --prompts_file=experiments/smollm2/prompts.txt --max_new_tokens=64

Decodes prompts with a stride of one token, which shows for every position of a text how
many tokens a call with drafts there would yield. For several prices, the time of such a
call in calls without drafts, the gate of `drafting.gate` then decides call by call. The
result is the time of plain decoding divided by that with the gate, beside drafting
always and drafting throughout the texts in which that pays, which nobody knows before.
Calls without drafts take exactly 1. Writes one JSON file with date and versions.
"""

import dataclasses

import numpy as np
from absl import flags

from benchmarks import records
from benchmarks.gate_replay import speeds
from benchmarks.refiner_gains import names_of_files
from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.data.text_readers import read_prompts_file
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.drafting.gate import GatedDrafter
from bpd_jax.evaluation import decode_flags

METHOD = flags.DEFINE_string("method", None, "a method without price.")
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/gate_cpu.json", "file.")

PRICES = (1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 2.0, 2.5)
# Shorter texts say little.
_SHORTEST = 16


def main() -> None:
    """Decodes the texts and replays the gate."""
    loaded, decoder, config = decode_flags.load(decode_flags.config())
    options = dataclasses.replace(config.options, stride=1)
    method = parse_method(cli.required("method"))
    if isinstance(decoder.drafter(method), GatedDrafter):
        raise UserError("--method has a gate already: leave out its price.")
    paths = decode_flags.PROMPTS_FILE.value
    texts: list[tuple[str, np.ndarray]] = []
    for name, path in zip(names_of_files(paths), paths, strict=True):
        prompts = [loaded.encode_prompt(text) for text in read_prompts_file(path)]
        with decode_flags.token_bar(name, len(prompts), config) as bar:
            decoded = decoder.decode(method, prompts, options, on_progress=bar.update)
        long = (text for text in decoded if len(text.accepted) >= _SHORTEST)
        texts += [(name, text.accepted) for text in long]
    rows = {f"{price:g}": speeds(texts, price) for price in PRICES}
    result = {
        **records.about("gate"),
        "precision": loaded.model.precision,
        "method": method.name,
        "texts": len(texts),
        "tokens_per_call_at_a_position": float(
            np.mean(np.concatenate([accepted for _, accepted in texts]))
        ),
        "speedup_by_price": rows,
    }
    records.write(OUTPUT.value, result)
    print("price   gate   always   best for each text   worst file with the gate")
    for price, row in rows.items():
        print(
            f"{price:<7} {row['gate']:.3f}  {row['always']:.3f}    "
            f"{row['best_for_each_text']:.3f}                "
            f"{min(row['gate_by_prompts_file'].values()):.3f}"
        )
    print(f"written to {OUTPUT.value}")


if __name__ == "__main__":
    cli.run(main)
