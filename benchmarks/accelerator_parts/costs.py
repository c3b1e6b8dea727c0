"""Random weights at real sizes: passes, drafting and refinement, in milliseconds.

From them, and from tokens per call on record, follow the speed-ups of BPD, of its
refinement and of trees (`speedups`).
"""

import functools
from collections.abc import Iterator

import numpy as np

from benchmarks.accelerator_parts import speedups
from benchmarks.accelerator_parts.jobs import (
    Job,
    JobSettings,
    Row,
    random_decoder,
    random_prompts,
)
from benchmarks.call_costs import measure_drafting, measure_passes
from benchmarks.synthetic_ngrams import synthetic_model
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.ngrams.model import NGramModel

MODELS = ("blockwise_1b5", "llama_7b")
PASSES = (1, 2, 4, 8, 16, 32, 64, 128)

# Drafting alone, then with n-grams that the device searches.
METHODS = tuple(dict.fromkeys(each.drafting for each in speedups.RECORDED))
_NGRAMS = 5_000_000


def jobs(settings: JobSettings) -> Iterator[Job]:
    """Passes, then each method, of each model and at the first two batch sizes."""
    for name in MODELS[:1] if settings.tiny else MODELS:
        decoder = functools.cache(lambda name=name: _decoder(settings, name))
        for batch in settings.batch_sizes[:2]:
            where = f"{name}, batch {batch}"
            passes = functools.cache(
                lambda batch=batch, decoder=decoder: _passes(settings, decoder(), batch)
            )
            yield f"{where}, passes", passes
            for method in METHODS[:1] if settings.tiny else METHODS:
                yield (
                    f"{where}, {method}",
                    lambda batch=batch, decoder=decoder, method=method, passes=passes: (
                        _drafting(decoder(), method, batch, passes())
                    ),
                )


@functools.cache
def _ngrams(size: int, vocab_size: int) -> NGramModel:
    return synthetic_model(size, vocab_size)


def _decoder(settings: JobSettings, name: str) -> Decoder:
    config = settings.model(name)
    size = 2000 if settings.tiny else _NGRAMS
    return random_decoder(config, _ngrams(size, config.trunk.vocab_size))


def _passes(settings: JobSettings, decoder: Decoder, batch: int) -> Row:
    sizes, text = ((1, 4), 16) if settings.tiny else (PASSES, 512)
    costs = measure_passes(decoder, batch, text, sizes)
    return {
        "dtype": settings.dtype,
        "text_tokens": text,
        "ms_by_tokens": {str(m): 1e3 * s for m, s in costs.seconds.items()},
    }


def _drafting(decoder: Decoder, method: str, batch: int, passes: Row) -> Row:
    """The time of drafting, and the speed-ups that follow for recorded methods."""
    [prompt] = random_prompts(1, 64, decoder.model.config.trunk.vocab_size)
    seconds = measure_drafting(decoder, parse_method(method), np.asarray(prompt), batch)
    return {
        "ms_drafting": 1e3 * seconds,
        "ngrams": sum(decoder.ngram.sizes),
        "speedups": speedups.measured(method, passes["ms_by_tokens"], 1e3 * seconds),
    }
