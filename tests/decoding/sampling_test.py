"""The model's choice of a token, and adjustments of its logits by the text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions, StepOptions
from bpd_jax.decoding.sampling import (
    ACCEPTANCE,
    DRAFTS,
    CommonNoise,
    adjusted,
    choose,
    filtered,
    row_keys,
    stream_keys,
)
from bpd_jax.drafting.assets import Assets
from tests.decoding.random_models import (
    make_drafter,
    make_model,
    make_ngram,
    read_texts,
)

SAMPLING = StepOptions(temperature=1.0)
filter_once = jax.jit(filtered, static_argnums=1)


def test_the_draw_depends_on_row_and_position_alone():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, 1, 1000)))
    single = choose(logits, jnp.array([[7]]), row_keys(3, jnp.array([5])), SAMPLING)
    batch = choose(
        jnp.broadcast_to(logits, (3, 4, 1000)),
        jnp.array([[1, 7, 7, 2]] * 3),
        row_keys(3, jnp.array([4, 5, 6])),
        SAMPLING,
    )
    assert batch[1, 1] == batch[1, 2] == single[0, 0]
    assert batch[1, 0] != single[0, 0]
    assert batch[0, 1] != single[0, 0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-3, 3), min_size=7, max_size=7),
    st.sampled_from([None, 1, 2, 4, 7, 20]),
    st.sampled_from([1e-6, 0.2, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.5, 1.0, 3.0]),
)
def test_filters_follow_their_definitions(scores, top_k, top_p, temperature):
    """Top-k, the lowest ids of equal scores; then the fewest best that have `top_p`."""
    options = StepOptions(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = np.array(scores, np.float32) / 2
    got = np.asarray(filter_once(jnp.asarray(logits), options))

    in_top_k = np.zeros(7, bool)
    in_top_k[np.argsort(-logits, kind="stable")[:top_k]] = True
    kept = sorted(set(logits[in_top_k].tolist()), reverse=True)
    mass = {v: (logits[in_top_k] == v).sum() * np.exp(v / temperature) for v in kept}
    reached, total, final = 0.0, sum(mass.values()), []
    for value in kept:
        # Tokens of equal scores are kept or dropped together.
        if reached >= top_p * total - 1e-6:
            break
        final.append(value)
        reached += mass[value]
    want = np.where(in_top_k & np.isin(logits, final), logits / temperature, -np.inf)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    "filters, kept",
    [
        ({"temperature": 1.0}, 7),
        ({"temperature": 0.5}, 7),
        # Tokens 1, 2, 4 and 5 are tied at the limit of top-k, which keeps two of them.
        ({"temperature": 1.0, "top_k": 4}, 4),
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.95}, 4),
    ],
)
def test_choices_follow_the_filtered_logits_with_ties(filters, kept):
    logits, count = jnp.array([3.0, 2.0, 2.0, 2.5, 2.0, 2.0, 0.0]), 10_000
    keys, positions = row_keys(0, jnp.array([0])), jnp.arange(count)[None]
    options = StepOptions(**filters)
    filtered_logits = filter_once(logits, options)
    finite = jnp.flatnonzero(jnp.isfinite(filtered_logits)).tolist()
    assert finite == list(range(kept))
    rows = jnp.broadcast_to(logits, (1, count, 7))
    drawn = choose(rows, positions, keys, options)
    share = np.bincount(np.asarray(drawn)[0], minlength=7) / count
    # Four standard deviations of a share.
    want = jax.nn.softmax(filtered_logits)
    np.testing.assert_allclose(share, want, atol=4 * 0.5 / np.sqrt(count))
    assert not share[kept:].any()


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_drafts_of_right_predictions_are_what_will_be_sampled(top_k, temperature):
    """With the model's own predictions, of a permuted vocabulary too."""
    options = StepOptions(temperature=temperature, top_k=top_k)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 50)))
    keys, lengths = row_keys(4, jnp.array([0, 3])), jnp.array([7, 9])
    positions = lengths[:, None] + 1 + jnp.arange(6)
    sampled = choose(logits, positions, keys, options)
    noise = CommonNoise(keys, lengths, 50, options)
    log_probs, order = jax.nn.log_softmax(logits), jnp.arange(50)[::-1]
    np.testing.assert_array_equal(noise(log_probs, 3).argmax(-1), sampled)
    permuted = noise(log_probs[..., order], 3, order)
    np.testing.assert_array_equal(order[permuted.argmax(-1)], sampled)
    assert (sampled != logits.argmax(-1)).any()


def test_rounding_changes_as_few_draws_with_top_k_as_without():
    """Rounding reorders nearly equal tokens, but must not reorder their noise."""
    count, vocab_size = 4000, 50
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 0.01, (1, count, vocab_size))
    rounded = logits + rng.uniform(-1e-3, 1e-3, logits.shape)
    keys, positions = row_keys(0, jnp.array([0])), jnp.arange(count)[None]

    def changed(options: StepOptions) -> float:
        draws = (choose(jnp.asarray(x), positions, keys, options) for x in variants)
        return float(jnp.mean(next(draws) != next(draws)))

    variants = (logits, rounded)
    assert changed(SAMPLING) < 0.005
    # Top-k of 49 leaves out one token, which may be another one.
    assert changed(StepOptions(temperature=1.0, top_k=vocab_size - 1)) < 0.01


def test_streams_of_noise_share_no_key():
    keys, positions = row_keys(0, jnp.arange(3)), jnp.arange(3) + 5
    choices = jax.vmap(jax.random.fold_in)(keys, positions)
    streams = [stream_keys(keys, positions, stream) for stream in (DRAFTS, ACCEPTANCE)]
    data = jnp.concatenate([jax.random.key_data(k) for k in (choices, *streams)])
    assert len(np.unique(np.asarray(data), axis=0)) == 9


def test_min_p_keeps_tokens_of_a_share_of_the_highest_probability():
    probs = jnp.array([0.5, 0.26, 0.24])
    options = StepOptions(temperature=1.0, min_p=0.5)
    kept = filtered(jnp.log(probs), options)
    assert jnp.isfinite(kept).tolist() == [True, True, False]


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
