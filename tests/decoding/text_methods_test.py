"""Methods that draft from the text alone, by themselves and in a tree with heads."""

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import Task, generate
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.sources.lookahead import LookaheadDrafter
from bpd_jax.drafting.sources.lookup import PromptLookup
from tests.decoding.random_models import ScriptedModel, make_model, make_prompts


def decode(model, name, prompts, options):
    decoder = Decoder(model, width=4)
    return decoder.decode(parse_method(name), prompts, options)


def texts(generations):
    return [generation.output_ids.tolist() for generation in generations]


@pytest.mark.parametrize(
    "name, temperature",
    [
        ("prompt_lookup:6", 0),
        ("lookahead:4", 0.5),
    ],
)
def test_text_of_a_model_without_heads_equals_plain_decoding(name, temperature):
    model = make_model(1, block_size=1)
    prompts = make_prompts([1, 5, 17])
    options = DecodeOptions(
        max_new_tokens=30, end_of_text=0, batch_size=3, temperature=temperature
    )
    want = decode(model, "greedy", prompts, options)
    got = decode(model, name, prompts, options)
    assert texts(got) == texts(want)
    assert sum(g.serial_calls for g in got) < sum(g.serial_calls for g in want)


def test_prompt_lookup_on_texts_that_repeat_themselves():
    model = ScriptedModel((4, 5, 6) * 12, right=())
    drafter = PromptLookup(5)
    options = DecodeOptions(max_new_tokens=17, batch_size=2)
    prompts = [np.array([6, 4, 5, 6, 4]), np.array([9])]
    long, short = generate(Task(model, drafter, options), prompts)
    # The prompt repeats itself already: all five copied tokens are always accepted.
    assert long.output_ids.tolist() == [5, 6, 4] * 5 + [5, 6]
    assert long.accepted.tolist() == [6, 6, 5]
    truncated = [5, 6, 4, 5, 6, -1]  # the limit
    assert long.drafts.tolist() == [[5, 6, 4, 5, 6, 4]] * 2 + [truncated]
    # Here no token is repeated before the fourth one.
    assert short.output_ids.tolist() == [4, 5, 6] * 5 + [4, 5]
    assert short.accepted.tolist() == [1, 1, 1, 6, 6, 2]
    padding = [-1] * 5
    assert short.drafts.tolist() == [
        [4, *padding],
        [5, *padding],
        [6, *padding],
        *[[4, 5, 6, 4, 5, 6]] * 2,
        [4, 5, *padding[1:]],
    ]
    assert short.nodes.tolist() == [1, 1, 1, 6, 6, 6]


def test_lookahead_on_a_script():
    """The scripted model predicts the next token at every position."""
    cycle = np.random.default_rng(0).permutation(40)
    script = tuple(int(token) for token in np.tile(cycle, 5))
    model = ScriptedModel(script, right=())
    window, order = 5, 3
    options = DecodeOptions(max_new_tokens=60)
    task = Task(model, LookaheadDrafter(window, order, 2), options)
    [generation] = generate(task, [np.array([49])])
    assert generation.output_ids.tolist() == list(script[:60])
    # At first the window is wrong everywhere, then only its older level, and `10` is
    # accepted. That shifts the columns by one: now all but the last one are right, and
    # the path goes to `13`.
    assert generation.accepted[:3].tolist() == [1, 2, 5]
    assert generation.block_efficiency > 2


def test_unsupported_methods_are_refused():
    decoder = Decoder(make_model(0), width=4)
    with pytest.raises(UserError, match="verifies 1200 tokens in every serial call"):
        decoder.drafter(parse_method("lookahead:200"))
    speculative = DecodeOptions(temperature=1.0, acceptance="speculative")
    with pytest.raises(UserError, match="cannot be combined with lookup"):
        decoder.drafter(parse_method("medusa:8:lookup=4"), speculative)
    # Deterministic drafts can.
    decoder.drafter(parse_method("zero_gram:2:lookup=4"), speculative)
