"""Requests of the Evaluation Harness, answered by a small trained model."""

import dataclasses
import types

import numpy as np
import pytest

from bpd_jax import api
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation.lm_eval_model import HarnessModel, decode_options

DEFAULTS = DecodeOptions(max_new_tokens=256, batch_size=8, seed=3, end_of_text=0)


def request(*arguments):
    return types.SimpleNamespace(args=arguments)


@pytest.fixture(scope="module")
def harness(trained):
    return HarnessModel(model=str(trained / "run"), method="greedy", batch_size=3)


@pytest.fixture(scope="module")
def without_bos(harness):
    """The same model without a begin-of-text token."""
    loaded = dataclasses.replace(harness.lm, begin_of_text=None)
    return with_loaded(harness, loaded)


def with_loaded(harness, loaded):
    copy = object.__new__(HarnessModel)
    copy.__dict__.update(harness.__dict__)
    copy.lm = loaded
    return copy


def test_texts_end_before_their_stop_texts(harness):
    [complete] = harness.generate_until([request("3 times", {"max_gen_toks": 40})])
    first, second = complete[5:7], complete[9:11]
    stops = [[first], first, [second, "", first], None]
    requests = [
        request("3 times", {"until": stop, "max_gen_toks": 40}) for stop in stops
    ]
    texts = harness.generate_until(requests)
    early, late = complete[: complete.index(first)], complete[: complete.index(second)]
    assert texts == [early, early, min(early, late, key=len), complete]


def test_texts_are_in_the_order_of_the_requests(harness):
    settings = [{"max_gen_toks": 6 + number % 2} for number in range(6)]
    contexts = ["5 times 1 is 5.\n" * (n % 4) + f"{n} times {n} is" for n in range(6)]
    requests = [request(*pair) for pair in zip(contexts, settings, strict=True)]
    single_texts = [harness.generate_until([single])[0] for single in requests]
    assert harness.generate_until(requests) == single_texts
    assert len(set(single_texts)) > 3


def test_long_contexts_are_truncated_on_the_left(harness):
    context = "4 times 4 is 16.\n" * 20
    ids = harness.lm.encode(context)
    assert len(ids) > 96
    task = {"max_gen_toks": 16}
    texts = harness.generate_until([request(context, task)])
    completions = api.generate(harness.lm, [ids[-80:]], "greedy", max_new_tokens=16)
    assert texts == [completions[0].text]
    with pytest.raises(
        UserError, match="up to 256 new tokens, but the model supports 96"
    ):
        harness.generate_until([request("x", {})])


def test_rolling_score_equals_the_score_of_the_text(harness):
    texts = ["3 times 4 is 12.", "", "7"]
    rolling = harness.loglikelihood_rolling([request(text) for text in texts])
    scores = harness.loglikelihood([request("", text) for text in texts])
    assert rolling == [score for score, _ in scores]
    assert all(type(score) is float for score in rolling)
    assert rolling[1] == 0.0
    begin, end = texts[0][:7], texts[0][7:]
    parts = harness.loglikelihood([request("", begin), request(begin, end)])
    assert rolling[0] == pytest.approx(sum(score for score, _ in parts), rel=1e-5)
    # Longer texts are scored in windows of 96 tokens.
    [long] = harness.loglikelihood_rolling([request("7 times 3 is 21.\n" * 30)])
    [score] = harness.loglikelihood_rolling([request("7 times 3 is 21.\n" * 29)])
    assert long < score < 0


def test_pairs_are_split_between_context_and_continuation(harness, without_bos):
    begin = harness.lm.begin_of_text

    def pair(model, *texts):
        ids, count = model.encode_pair(*texts)
        assert ids.dtype == np.int32
        decode = model.lm.tokenizer.decode
        return ids[0] == begin, decode(ids[len(ids) - count :])

    for model, begins in ((harness, True), (without_bos, False)):
        assert pair(model, "4 times 2 is ", "8.") == (begins, " 8.")
        assert pair(model, "4 times 2 is", " 8.") == (begins, " 8.")
        # A scored token needs a preceding token.
        assert pair(model, "", "8.") == (True, "8.")
        assert pair(model, " \n", "8.") == (True, " \n8.")
        assert model.encode_pair("", "")[1] == 0
        assert model.encode_pair("4", "")[1] == 0
    # Without a begin token in the text, an empty context is that of the model, if any.
    loaded, ends = without_bos.lm, (harness.lm.tokenizer.end_of_text,)
    for begin, want in ((None, ends[0]), (7, 7)):
        lm = dataclasses.replace(loaded, begin_token=begin, end_tokens=ends)
        ids, count = with_loaded(without_bos, lm).encode_pair("", "8.")
        assert (ids[0], count) == (want, len(ids) - 1)


def test_answers_are_cached_unless_sampled(harness):
    cached = {}

    class CachingModel(HarnessModel):
        def keep(self, kind, arguments, answer):
            cached[kind, arguments[0]] = answer

    model = with_loaded(harness, harness.lm)
    model.__class__ = CachingModel
    [score] = model.loglikelihood([request("2", " times")])
    [rolling] = model.loglikelihood_rolling([request("2 times")])
    sampled = request("5", {"max_gen_toks": 4, "temperature": 1.0})
    text, _ = model.generate_until([request("2", {"max_gen_toks": 4}), sampled])
    assert cached == {
        ("loglikelihood", "2"): score,
        ("loglikelihood_rolling", "2 times"): rolling,
        ("generate_until", "2"): text,
    }


@pytest.mark.parametrize(
    "settings, options",
    [
        ({"until": ["\n", "", "Q:"]}, {"stop": ("\n", "Q:")}),
        ({"max_tokens": 9, "max_new_tokens": 8}, {"max_new_tokens": 8}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "seed": 5},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "seed": 5},
        ),
    ],
)
def test_settings_of_a_task_are_converted_to_options(settings, options):
    before = dict(settings)
    assert decode_options(settings, DEFAULTS) == dataclasses.replace(
        DEFAULTS, **options
    )
    assert settings == before


def test_settings_that_cannot_be_met_are_refused():
    with pytest.raises(UserError, match="a task sets num_beams"):
        decode_options({"num_beams": 4}, DEFAULTS)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"ngrams": "x"}, "unknown model argument 'ngrams': give model, method, heads"),
        ({"chat_template_args": "x"}, "chat_template_args must be a mapping such as"),
        ({"max_length": 97}, r"max_length must be an integer from 2 to 96"),
    ],
)
def test_invalid_arguments_are_refused_on_construction(trained, arguments, message):
    with pytest.raises(UserError, match=message):
        HarnessModel(**{"model": str(trained / "run"), **arguments})


def test_arguments_may_be_strings(trained):
    model = HarnessModel(
        model=str(trained / "plain"),
        method="prompt_lookup:2",
        ngram=str(trained / "run" / "ngram"),
        batch_size="4",
        precision="bfloat16",
        max_length=64,
    )
    assert model.max_length == 64
    assert model.lm.assets.ngram is not None
    assert model.lm.config.trunk.dtype == "bfloat16"
    [text] = model.generate_until([request("3", {"max_gen_toks": 5})])
    assert text


def test_chats_are_rendered_with_the_models_template(harness):
    pytest.importorskip("jinja2")
    from bpd_jax.decoding.loaded_model import Chat

    chat = Chat(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
        "{% if enable_thinking %}<think>{% endif %}"
    )
    loaded = dataclasses.replace(harness.lm, chat=chat)
    chat_model = with_loaded(harness, loaded)
    messages = [{"role": "user", "content": "3 times 4?"}]
    text = chat_model.apply_chat_template(messages)
    assert text == "<user>3 times 4?<|endoftext|>\n<assistant>"
    continued = [*messages, {"role": "assistant", "content": "It is "}]
    text = chat_model.apply_chat_template(continued, add_generation_prompt=False)
    assert text == "<user>3 times 4?<|endoftext|>\n<assistant>It is "
    with pytest.raises(UserError, match="an empty conversation"):
        chat_model.apply_chat_template([])
    assert chat_model.chat_template(True) == chat.template
    assert chat_model.tokenizer_name == harness.lm.name
    # Special tokens of the template are encoded as such, and the first only once.
    begin = loaded.begin_of_text
    assert chat_model.encode(text).count(begin) == 2
    assert harness.encode(text).count(begin) == 1
    assert chat_model.encode("<|endoftext|>3") == [begin, *loaded.tokenizer.encode("3")]
    with pytest.raises(UserError, match="one chat template"):
        chat_model.chat_template("tools")
    with pytest.raises(UserError, match="has no chat template: leave out"):
        harness.apply_chat_template(messages)
