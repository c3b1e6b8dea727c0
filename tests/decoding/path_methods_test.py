"""Methods that run small networks along the draft: lossless, and on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.methods import parse_method
from bpd_jax.decoding.options import BATCHED, SPECULATIVE, TREE, DecodeOptions
from bpd_jax.drafting.assets import Assets, SmallModel
from bpd_jax.errors import UserError
from bpd_jax.models.refiner_files import LoadedRefiner
from bpd_jax.models.refiners import KINDS, init_refiner

VOCAB, LENGTH, WIDTH = 13, 3, 3
GREEDY = parse_method("greedy")
# What is drafted does not depend on how it is verified, and `lossless_test` has the
# methods whose networks need no training run.
CASES = [
    ("neural:2:lookup=6", 3, BATCHED),
    ("markov:2", 3, BATCHED),
    ("recurrent:2", 3, TREE),
    ("hydra:6:search=best", 3, TREE),
    ("hydra:2", 1, BATCHED),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in [
            ("neural:2", 3, TREE),
            ("neural:2", 1, BATCHED),
            ("neural:2:mode=parallel", 3, TREE),
            ("neural_ngram:2", 3, TREE),
            ("medusa_neural:6", 3, BATCHED),
            ("draft_model:2:drafts=2", 3, TREE),
            ("draft_model:2:drafts=2", 1, BATCHED),
        ]
    ),
]


def random_refiner(kind, heads=LENGTH):
    config = KINDS[kind](VOCAB, 16, heads)
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(lambda: init_refiner(config, jax.random.key(0)))
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32), shapes
    )
    return LoadedRefiner(config, params, {})


@pytest.fixture(scope="module")
def decoder(make_model, make_ngram):
    small = SmallModel(*make_model(5, block_size=1, num_layers=1))
    refiners = {kind: random_refiner(kind) for kind in KINDS}
    assets = Assets(ngram=make_ngram(), rescorer=small, draft_model=small, **refiners)
    model = make_model(0, block_size=LENGTH, num_layers=1)
    return Decoder(*model, width=WIDTH, assets=assets)


@pytest.fixture(scope="module")
def prompts(make_prompts):
    return make_prompts([5, 1, 30])


@pytest.mark.parametrize("name, batch, verification", CASES)
def test_every_method_is_lossless_and_stays_on_the_device(
    decoder, prompts, name, batch, verification
):
    method, prompts = parse_method(name), prompts[:batch]
    options = DecodeOptions(
        max_new_tokens=15,
        end_of_text=3,
        batch_size=batch,
        verification=verification,
    )
    reference = decoder.decode(GREEDY, prompts, options)
    got = decoder.decode(method, prompts, options)
    for ours, want in zip(got, reference, strict=True):
        assert ours.output_ids.tolist() == want.output_ids.tolist()
        assert ours.accepted.sum() == len(want.output_ids)
    # The same shapes again, hence the same compiled code.
    task = decoder.task(method, options)
    state = task.prefill(prompts, range(batch), batch, 15)
    with jax.transfer_guard("disallow"):
        state = jax.block_until_ready(task.run(state))
    assert state.lengths.tolist() == [
        len(want.input_ids) + len(want.output_ids) for want in reference
    ]


def test_small_model_reaches_as_far_as_drafts_beside_its_own(decoder):
    def reach(name):
        drafter = decoder.drafter(parse_method(name))
        return getattr(drafter, "first", drafter).paths.others[0].small.reach

    assert reach("neural") == LENGTH
    assert reach("neural:lookup=1") == LENGTH
    # The certain token and six copied ones.
    assert reach("neural:lookup=6") == 7


@pytest.mark.parametrize("acceptance", ["exact", SPECULATIVE])
def test_a_draft_model_equal_to_the_model_is_always_right(
    make_model, prompts, acceptance
):
    model = make_model(0, block_size=1, num_layers=1)
    assets = Assets(draft_model=SmallModel(*model))
    decoder = Decoder(*model, width=WIDTH, assets=assets)
    temperature = 0.0 if acceptance == "exact" else 0.8
    options = DecodeOptions(
        max_new_tokens=20, temperature=temperature, acceptance=acceptance
    )
    # All tokens are kept of its distributions, so that they are the model's own.
    method = parse_method(f"draft_model:4:k={VOCAB}")
    for generation in decoder.decode(method, prompts, options):
        assert generation.accepted.tolist() == [5] * 4
        assert generation.block_efficiency == 5


@pytest.mark.parametrize(
    "name, words",
    [
        ("draft_model:4:k=2:drafts=3", "drafts that begin differently"),
        ("draft_model:600:drafts=2", "more than 1024"),
        ("draft_model:4:k=14", "13 tokens"),
        ("neural:2:search=exact", "search=beam"),
        ("ngram:8:search=best:normalise=1", "normalise changes nothing"),
        ("medusa_ngram:8:normalise=0", "not a setting"),
    ],
)
def test_settings_that_do_not_fit_are_refused(decoder, name, words):
    with pytest.raises(UserError, match=words):
        decoder.drafter(parse_method(name))


@pytest.mark.parametrize(
    "kind, refiner, words",
    [
        ("markov", random_refiner("hydra"), "pass it as --hydra"),
        ("hydra", random_refiner("hydra", heads=5), "5 heads"),
        ("recurrent", None, "train one with"),
    ],
)
def test_refiners_that_do_not_fit_are_refused(make_model, kind, refiner, words):
    model = make_model(0, block_size=LENGTH, num_layers=1)
    decoder = Decoder(*model, width=WIDTH, assets=Assets(**{kind: refiner}))
    with pytest.raises(UserError, match=words):
        decoder.drafter(parse_method(kind))


@pytest.mark.parametrize("name", ["neural", "draft_model"])
def test_texts_longer_than_the_small_model_reads_are_refused(make_model, prompts, name):
    small = SmallModel(*make_model(5, block_size=1, num_layers=1, max_length=40))
    assets = Assets(rescorer=small, draft_model=small)
    model = make_model(0, block_size=LENGTH, num_layers=1)
    decoder = Decoder(*model, width=WIDTH, assets=assets)
    options = DecodeOptions(max_new_tokens=15)
    words = "prompt 3 has 30 tokens, but the small model holds 40"
    for run in (decoder.check, decoder.decode):
        with pytest.raises(UserError, match=words):
            run(parse_method(name), prompts, options)
    with pytest.raises(UserError, match="prompt 1 has 30 tokens"):
        decoder.stream(parse_method(name), prompts[2], options)
