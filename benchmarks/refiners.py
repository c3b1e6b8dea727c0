"""Block efficiency of each refiner with greedy, p-best and tree searches.

    python -m benchmarks.refiners --model=demo

Decodes held-out prompts by plain greedy decoding and replays every method on them, so
that all methods get the same lattices and only drafting is computed. The prompts of a
file are decoded as one batch, whatever --batch_size is. Block efficiencies are reported
for all prompts and for each file of prompts, with a paired bootstrap interval of the
gain over one method for all prompts. For a method with refiners, the gains over the
same source and search without any of them, and without each, are reported too, if those
methods are listed before it.
Writes one JSON file with date and versions.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import flags

from benchmarks import records
from benchmarks.refiner_gains import (
    draft_vocabularies,
    gain_over,
    names_of_files,
    refinement,
    share_of_tokens,
)
from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError
from bpd_jax.data.text_readers import read_prompts_file
from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.replay import check_replayable, record
from bpd_jax.evaluation import decode_flags, prompt_flags
from bpd_jax.evaluation.draft_statistics import draft_statistics
from bpd_jax.evaluation.efficiency import block_efficiency

# One row of searches for each score.
flags.set_default(
    prompt_flags.METHODS,
    [
        *("zero_gram:1", "zero_gram:16", "zero_gram:64:search=best", "medusa:64"),
        *("ngram:1:search=greedy", "ngram:1", "ngram:1:normalise=1"),
        *("ngram:16:search=beam", "ngram:16", "ngram:64:search=best"),
        *("ngram:1:adaptive=1:search=greedy", "ngram:1:adaptive=1"),
        *("ngram:16:adaptive=1", "ngram:64:adaptive=1:search=best"),
        *("markov:1:search=greedy", "markov:1", "markov:1:normalise=0"),
        *("markov:16:search=beam", "markov:16", "markov:64:search=best"),
        *("neural:1", "neural:1:mode=parallel", "neural:16", "neural:16:normalise=1"),
        *("neural:64:search=best", "neural_ngram:1", "oracle"),
    ],
)
BASELINE = flags.DEFINE_string("baseline", "bpd", "baseline of the gains.")
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/refiners.json", "file.")


def main() -> None:
    """Replays the methods; prints and writes the results."""
    loaded, decoder, config = decode_flags.load(decode_flags.config())
    baseline = parse_method(BASELINE.value)
    asked = dict.fromkeys([baseline, *prompt_flags.methods()])
    groups = _groups(loaded)
    prompts = [prompt for group in groups.values() for prompt in group]
    options = config.options
    check_replayable(baseline)
    decoder.check(baseline, prompts, options)
    methods: list[Method] = []
    for method in asked:
        try:
            check_replayable(method)
            decoder.check(method, prompts, options)
            methods.append(method)
        except UserError as error:
            print(f"left out: {error}")
    texts: list[Generation] = []
    for group in groups.values():
        # Prompts of a file have similar lengths, which reduces padding.
        together = dataclasses.replace(options, batch_size=len(group))
        with decode_flags.token_bar("decoding", len(group), config) as bar:
            texts += decoder.decode(GREEDY, group, together, on_progress=bar.update)
    width = max([decoder.width, *(method.setting("k") or 1 for method in methods)])
    with progress.bar(label="recording", total=len(texts), unit=" texts") as bar:
        replay = record(
            decoder,
            texts,
            options,
            width=width,
            on_progress=bar.update,
        )
    replayer = replay.decoder(width=decoder.width, alpha=decoder.alpha)
    result = {
        **records.about("refiners"),
        "prompts": len(prompts),
        "new_tokens": options.max_new_tokens,
        "lattice_width": decoder.width,
        "baseline": baseline.name,
        "in_draft_vocabulary": {
            source: share_of_tokens(np.asarray(tokens), texts)
            for source, tokens in draft_vocabularies(loaded, decoder).items()
        },
    }
    rows: dict[str, dict[str, Any]] = {}
    replayed: dict[Method, list[Generation]] = {}
    with progress.bar(label="replaying", total=len(methods), unit=" methods") as bar:
        for method in methods:
            bar.set_postfix_str(method.name, refresh=False)
            replayed[method] = replay.decode(method, replayer)
            rows[method.name] = {
                **_row(replayed[method], replayed[baseline], groups),
                **refinement(method, replayed),
            }
            # After every method, so that an interrupted run leaves results.
            records.write(OUTPUT.value, {**result, "methods": rows})
            bar.update(1)
    for source, share in result["in_draft_vocabulary"].items():
        print(
            f"{source}: {100 * share:.1f} % of the tokens are in its draft vocabulary"
        )
    print(f"{'method':<44} tokens/call  checked  gain over {baseline.name}")
    for name, row in rows.items():
        print(
            f"{name:<44} {row['block_efficiency']:>11.2f} "
            f"{row['nodes_per_call']:>8.1f}  {_percent(row)}"
        )
        for gain in row.get("refinement", ()):
            print(f"    over {gain['over']}: {_percent(gain)}")
    print(f"written to {OUTPUT.value}")


def _percent(row: Mapping[str, Any]) -> str:
    low, high = row["paired_interval"]
    return f"{100 * row['gain']:+.1f} % ({100 * low:+.1f} … {100 * high:+.1f})"


def _groups(loaded: LanguageModel) -> dict[str, list[np.ndarray]]:
    """The prompts, by file."""
    paths = decode_flags.PROMPTS_FILE.value
    if not paths:
        return {"held-out": prompt_flags.prompts(loaded)[0]}
    return {
        name: [loaded.encode_prompt(text) for text in read_prompts_file(path)]
        for name, path in zip(names_of_files(paths), paths, strict=True)
    }


def _row(
    generations: list[Generation],
    base: list[Generation],
    groups: dict[str, list[np.ndarray]],
) -> dict[str, Any]:
    """The results of one method, as they are reported."""
    rest = iter(generations)
    apart = {
        name: list(itertools.islice(rest, len(group))) for name, group in groups.items()
    }
    drafts = draft_statistics(generations)
    return {
        "block_efficiency": block_efficiency(generations),
        **gain_over(generations, base),
        "nodes_per_call": drafts.nodes,
        "equal_neighbours": drafts.repeated,
        "by_prompts_file": {
            name: block_efficiency(group) for name, group in apart.items()
        },
    }


if __name__ == "__main__":
    cli.run(main)
