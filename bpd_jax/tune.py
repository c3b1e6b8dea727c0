"""Measures a model on this device and predicts the speed of every decoding method.

    python -m bpd_jax.tune --model=runs/demo --batch_sizes=1,8

Decodes held-out prompts, at least as many as the largest batch, with plain decoding,
replays `--methods`, by default all that the model supports, on these texts without the
model, times passes over 1 … 128 draft tokens, and prints the predicted speed-ups.
It saves two results in the run folder (`drafting.json`): the accuracies of each head's
candidates, from which `decode` and `evaluate` compute the shape of Medusa trees, and
the fastest method for every batch size.
"""

import dataclasses
import pathlib

from absl import flags

from bpd_jax.base import cli, progress, provenance
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import each, integer
from bpd_jax.decoding.asset_files import TUNING, TUNING_FORMAT
from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.decoding.replay import record
from bpd_jax.decoding.speedup import (
    Choice,
    Prediction,
    candidate_methods,
    check_methods,
    predict,
)
from bpd_jax.evaluation import decode_flags, prompt_flags
from bpd_jax.reporting.terminal import print_rows
from bpd_jax.storage import files
from bpd_jax.training import hosts, process_flags

BATCH_SIZES = cli.DEFINE_checked(
    "batch_sizes", "1", "numbers of prompts decoded together.", each(integer(1))
)
flags.set_default(prompt_flags.NUM_PROMPTS, 16)

# Minimum number of predictions of a head for an estimate of its accuracy, and number
# of ranks that a Medusa tree considers.
_LEAST_GUESSES, _RANKS = 50, 10


def main() -> None:
    """Measures the model, prints predictions, and saves them."""
    sizes = BATCH_SIZES.value
    methods = prompt_flags.methods()
    loaded, decoder, config = decode_flags.load(decode_flags.config())
    if config.options.temperature != 0:
        raise UserError("tune decodes greedily: the temperature must be 0.")
    prompts, _ = prompt_flags.prompts(loaded, least=max(sizes))
    methods = methods or candidate_methods(decoder, prompts, config.options)
    check_methods(decoder, methods, prompts, config.options)
    options = dataclasses.replace(config.options, batch_size=len(prompts))
    with decode_flags.token_bar("decoding", len(prompts), config) as bar:
        texts = decoder.decode(GREEDY, prompts, options, on_progress=bar.update)
    widths = [_RANKS, decoder.width, *(method.setting("k") or 1 for method in methods)]
    replay = record(decoder, texts, options, width=max(widths), keep_hidden=True)
    total = len({GREEDY, *methods})
    with progress.bar(label="predicting", total=total, unit=" methods") as bar:
        by_size = predict(
            decoder,
            replay,
            methods,
            sizes,
            on_progress=lambda method: progress.advance(bar, method.name),
        )
    choices = {size: Choice.among(predictions) for size, predictions in by_size.items()}
    for size, choice in choices.items():
        _print(size, choice)
    path = loaded.folder / TUNING
    try:
        accuracies = replay.accuracies(_RANKS, _LEAST_GUESSES)
    except UserError as error:
        raise UserError(
            f"{path} was not written: {error} See --num_prompts and --max_new_tokens."
        ) from error
    _write(path, accuracies, choices, loaded.heads_identity)
    print(f"head accuracies and predictions: {path}")


def _print(batch_size: int, choice: Choice) -> None:
    def row(p: Prediction) -> list[str]:
        timed = p.draft_seconds is not None
        drafting = f"{1e3 * (p.draft_seconds or 0.0):.2f}" if timed else "not timed"
        return [
            p.method.name,
            f"{'' if p.replayed else '≤ '}{p.block_efficiency:.2f}",
            f"{p.nodes:.0f}",
            f"{1e3 * p.pass_seconds:.2f}",
            drafting if p.replayed else "not tried",
            f"{'' if timed else '≤ '}{p.speedup:.2f}",
        ]

    headings = ["Method", "Tokens\nper call", "Tokens\nverified", "Pass\n(ms)"]
    print_rows(
        [*headings, "Drafting\n(ms)", "Predicted\nspeed-up"],
        map(row, choice.predictions),
        title=f"batch size {batch_size}",
        strong=[choice.method.name],
        frame=False,
    )
    print(f"Choice: {choice}\n")


def _write(
    path: pathlib.Path,
    accuracies: tuple[tuple[float, ...], ...],
    choices: dict[int, Choice],
    heads: str | None,
) -> None:
    def row(p: Prediction) -> dict[str, object]:
        return {**dataclasses.asdict(p), "method": p.method.name}

    facts = {
        "format": TUNING_FORMAT,
        "accuracies": accuracies,
        "heads": heads,
        "date": provenance.today(),
        "device": provenance.device(),
        "versions": provenance.versions(),
        "choices": {size: choice.method.name for size, choice in choices.items()},
        "predictions": {
            size: [row(p) for p in choice.predictions]
            for size, choice in choices.items()
        },
    }

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, facts)

    hosts.first(write)


if __name__ == "__main__":
    process_flags.run(main)
