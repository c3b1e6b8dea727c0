"""Tests of bpd_jax.decoding.sampling."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions, StepOptions
from bpd_jax.decoding.sampling import adjusted
from bpd_jax.drafting.assets import Assets
from tests.decoding.random_models import (
    make_drafter,
    make_model,
    make_ngram,
    read_texts,
)

V = 14
OPTIONS = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"bad_words_ids": ((3,), (4, 5), (1, 2, 6), (0,))},
    {"suppress_tokens": (7, 2)},
    {"begin_suppress_tokens": (1, 0)},
    {"min_length": 9},
    {"min_new_tokens": 3},
    {"min_new_tokens": 5, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
]


def reference(logits, text, start, options):
    """The definitions of transformers' logits processors, one text at a time."""
    logits = np.array(logits, np.float64)
    penalty = options.repetition_penalty or 1
    for token in set(text):
        high = logits[token] > 0
        logits[token] *= 1 / penalty if high else penalty
    if size := options.no_repeat_ngram_size:
        last = tuple(text[len(text) - size + 1 :]) if len(text) >= size - 1 else None
        for i in range(len(text) - size + 1):
            if tuple(text[i : i + size - 1]) == last:
                logits[text[i + size - 1]] = -np.inf
    for *before, last in options.bad_words_ids or ():
        if not before and last == options.end_of_text:
            continue
        fits = len(before) < len(text) or not before
        if fits and text[len(text) - len(before) :] == before:
            logits[last] = -np.inf
    too_short = len(text) < (options.min_length or 0)
    if too_short or len(text) - start < (options.min_new_tokens or 0):
        logits[options.end_of_text] = -np.inf
    for token in options.suppress_tokens or ():
        logits[token] = -np.inf
    if len(text) == start:
        for token in options.begin_suppress_tokens or ():
            logits[token] = -np.inf
    return logits


@pytest.mark.parametrize("changes", OPTIONS)
def test_adjustments_are_those_of_transformers(changes):
    options = StepOptions(end_of_text=0, **changes)
    assert options.adjusts
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 8, (4, 6, 20)).astype(np.int32)
    lengths = rng.integers(1, 18, (4, 6))
    starts = np.minimum(lengths.min(1), [1, 3, 5, 9])
    logits = rng.normal(0, 3, (4, 6, V))
    got = adjusted(*map(jnp.asarray, (logits, texts, lengths, starts)), options)
    for row, node in np.ndindex(4, 6):
        text = texts[row, node, : lengths[row, node]].tolist()
        want = reference(logits[row, node], text, starts[row], options)
        np.testing.assert_allclose(got[row, node], want, rtol=1e-5)


@pytest.fixture(scope="module")
def decoder():
    model = make_model(3, 4, V, num_layers=1, max_length=64)
    drafter = make_drafter(model, seed=5, markov_rank=3)
    assets = Assets(ngram=make_ngram(V), drafter=drafter)
    return Decoder(model, width=3, assets=assets)


def naive(decoder, prompt, options, count):
    """One pass over the whole text for every token."""
    text = list(prompt)
    for _ in range(count):
        # Of one length, so that one program is compiled.
        tokens = jnp.asarray([text + [0] * (len(prompt) + count - len(text))])
        logits = read_texts(decoder.model, tokens)[0][0, len(text) - 1]
        text.append(int(reference(logits, text, len(prompt), options).argmax()))
        if text[-1] == options.end_of_text:
            break
    return text[len(prompt) :]


def test_every_method_decodes_the_adjusted_text(decoder):
    options = DecodeOptions(max_new_tokens=12, end_of_text=0, **OPTIONS[-1])
    prompt = np.array([5, 6, 7, 5, 6], np.int32)
    want = naive(decoder, prompt.tolist(), options, 12)
    assert want != naive(decoder, prompt.tolist(), DecodeOptions(), 12)
    sampled = dataclasses.replace(options, temperature=1.0, min_p=0.05)
    [plain] = decoder.decode(parse_method("greedy"), [prompt], sampled)
    for name, chosen, tokens in (
        ("heads+ngram/tree:6", options, want),
        ("block/tree:5+lookup:3", sampled, plain.output_ids.tolist()),
    ):
        [output] = decoder.decode(parse_method(name), [prompt], chosen)
        assert output.output_ids.tolist() == tokens, name
