"""Requests of an evaluation harness, answered by a small trained model."""

import dataclasses
import types

import numpy as np
import pytest

from bpd_jax import api
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError
from bpd_jax.lm_eval_model import HarnessModel, _length_class, decode_options

CONTEXTS = ["3 times 4 is", "7", "2 times 2 is 4.\n2 times 3", ""]
DEFAULTS = DecodeOptions(max_new_tokens=256, batch_size=8, seed=3, end_of_text=0)


def request(*arguments):
    return types.SimpleNamespace(args=arguments)


@pytest.fixture(scope="module")
def harness(trained):
    return HarnessModel(model=str(trained / "run"), method="greedy", batch_size=3)


@pytest.fixture(scope="module")
def bare(harness):
    """The same model as one whose texts have no begin-of-text token."""
    loaded = dataclasses.replace(harness.lm.loaded, begin_of_text=None)
    return changed(harness, loaded)


def changed(harness, loaded):
    other = object.__new__(HarnessModel)
    other.__dict__.update(harness.__dict__)
    other.lm = dataclasses.replace(harness.lm, loaded=loaded)
    return other


@pytest.mark.parametrize("method", ["bpd", "zero_gram:4", "prompt_lookup"])
def test_drafting_changes_no_text(harness, trained, method):
    drafted = HarnessModel(model=str(trained / "run"), method=method, batch_size=2)
    task = {"until": ["\n", "7."], "max_gen_toks": 20}
    requests = [request(text, task) for text in CONTEXTS]
    assert drafted.generate_until(requests) == harness.generate_until(requests)


def test_texts_end_before_their_stop_texts(harness):
    [whole] = harness.generate_until([request("3 times", {"max_gen_toks": 40})])
    first, second = whole[5:7], whole[9:11]
    ends = [[first], first, [second, "", first], None]
    requests = [request("3 times", {"until": end, "max_gen_toks": 40}) for end in ends]
    found = harness.generate_until(requests)
    early, late = whole[: whole.index(first)], whole[: whole.index(second)]
    assert found == [early, early, min(early, late, key=len), whole]


def test_texts_are_in_the_order_of_the_requests(harness):
    settings = [{"max_gen_toks": 6 + number % 2} for number in range(6)]
    contexts = ["5 times 1 is 5.\n" * (n % 4) + f"{n} times {n} is" for n in range(6)]
    requests = [request(*pair) for pair in zip(contexts, settings, strict=True)]
    alone = [harness.generate_until([one])[0] for one in requests]
    assert harness.generate_until(requests) == alone
    assert len(set(alone)) > 3


def test_prompts_of_like_length_go_together():
    lengths = [1, 128, 129, 512, 513, 2048, 2049]
    assert [_length_class(length) for length in lengths] == [0, 0, 1, 1, 2, 2, 3]


def test_long_contexts_are_truncated_on_the_left(harness):
    context = "4 times 4 is 16.\n" * 20
    ids = harness.lm.encode(context)
    assert len(ids) > 96
    task = {"max_gen_toks": 16}
    found = harness.generate_until([request(context, task)])
    kept = api.generate(harness.lm, [ids[-80:]], "greedy", max_new_tokens=16)
    assert found == [kept[0].text]
    with pytest.raises(
        UserError, match="up to 256 new tokens, but the model supports 96"
    ):
        harness.generate_until([request("x", {})])


def test_scores_do_not_depend_on_batches(harness, trained):
    one = HarnessModel(model=str(trained / "run"), method="greedy")
    pairs = [(text, answer) for text in CONTEXTS for answer in (" 12.", " no", "7 ")]
    requests = [request(*pair) for pair in pairs]
    together, alone = harness.loglikelihood(requests), one.loglikelihood(requests)
    assert [greedy for _, greedy in together] == [greedy for _, greedy in alone]
    np.testing.assert_allclose(
        [score for score, _ in together], [score for score, _ in alone], rtol=1e-5
    )
    assert all(type(score) is float for score, _ in together)


def test_the_text_that_is_written_is_the_greedy_one(harness):
    [text] = harness.generate_until([request(CONTEXTS[0], {"max_gen_toks": 9})])
    scores = harness.loglikelihood(
        [request(CONTEXTS[0], text), request(CONTEXTS[0], text[:-1] + "#")]
    )
    assert [greedy for _, greedy in scores] == [True, False]
    assert scores[0][0] > scores[1][0]


def test_a_rolling_score_is_that_of_the_complete_text(harness):
    texts = ["3 times 4 is 12.", "", "7"]
    rolling = harness.loglikelihood_rolling([request(text) for text in texts])
    whole = harness.loglikelihood([request("", text) for text in texts])
    assert rolling == [score for score, _ in whole]
    assert rolling[1] == 0.0
    begin, end = texts[0][:7], texts[0][7:]
    parts = harness.loglikelihood([request("", begin), request(begin, end)])
    assert rolling[0] == pytest.approx(sum(score for score, _ in parts), rel=1e-5)
    # 96 tokens are read at once; the rest follows in windows of its own.
    [long] = harness.loglikelihood_rolling([request("7 times 3 is 21.\n" * 30)])
    [score] = harness.loglikelihood_rolling([request("7 times 3 is 21.\n" * 29)])
    assert long < score < 0


def test_pairs_are_split_between_context_and_continuation(harness, bare):
    begin = harness.lm.loaded.begin_of_text

    def pair(model, *texts):
        ids, count = model.encode_pair(*texts)
        assert ids.dtype == np.int32
        decode = model.lm.loaded.tokenizer.decode
        return ids[0] == begin, decode(ids[len(ids) - count :])

    for model, begun in ((harness, True), (bare, False)):
        assert pair(model, "4 times 2 is ", "8.") == (begun, " 8.")
        assert pair(model, "4 times 2 is", " 8.") == (begun, " 8.")
        # Something must come before what is scored.
        assert pair(model, "", "8.") == (True, "8.")
        assert pair(model, " \n", "8.") == (True, " \n8.")
        assert model.encode_pair("", "")[1] == 0
        assert model.encode_pair("4", "")[1] == 0


def test_a_token_over_the_border_is_scored(bare):
    tokenizer = bare.lm.loaded.tokenizer
    merged = next(
        text
        for text in map(tokenizer.piece, range(tokenizer.vocab_size - 1, 0, -1))
        if text.isalpha() and len(tokenizer.encode(text)) == 1 and len(text) > 1
    )
    ids, count = bare.encode_pair(merged[:-1], merged[-1])
    assert count == 1
    assert ids.tolist() == [tokenizer.end_of_text, *tokenizer.encode(merged)]


def test_answers_are_kept_unless_they_were_drawn(harness):
    kept = {}

    class Keeping(HarnessModel):
        def keep(self, kind, arguments, answer):
            kept[kind, arguments[0]] = answer

    keeping = changed(harness, harness.lm.loaded)
    keeping.__class__ = Keeping
    [score] = keeping.loglikelihood([request("2", " times")])
    [rolling] = keeping.loglikelihood_rolling([request("2 times")])
    drawn = request("5", {"max_gen_toks": 4, "temperature": 1.0})
    text, _ = keeping.generate_until([request("2", {"max_gen_toks": 4}), drawn])
    assert kept == {
        ("loglikelihood", "2"): score,
        ("loglikelihood_rolling", "2 times"): rolling,
        ("generate_until", "2"): text,
    }


@pytest.mark.parametrize(
    "settings, options",
    [
        ({}, {}),
        ({"until": "\n"}, {"stop": ("\n",)}),
        ({"until": ["\n", "", "Q:"]}, {"stop": ("\n", "Q:")}),
        ({"until": None, "max_gen_toks": 7}, {"max_new_tokens": 7}),
        ({"max_tokens": 9, "max_new_tokens": 8}, {"max_new_tokens": 8}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.0, "top_k": 4}, {}),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "seed": 5},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "seed": 5},
        ),
        ({"temperature": 0.6, "top_k": 0}, {"temperature": 0.6}),
        ({"num_beams": 1}, {}),
    ],
)
def test_settings_of_a_task_are_converted_to_options(settings, options):
    before = dict(settings)
    assert decode_options(settings, DEFAULTS) == dataclasses.replace(
        DEFAULTS, **options
    )
    assert settings == before


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_beams": 4}, "a task sets num_beams"),
        ({"repetition_penalty": 1.1}, "a task sets repetition_penalty"),
        ({"max_gen_toks": "many"}, "max_new_tokens must be"),
        ({"temperature": -1}, "temperature must be"),
        ({"until": [3]}, "stop must be a list"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        decode_options(settings, DEFAULTS)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"ngrams": "x"}, "unknown model argument 'ngrams': give model, method, heads"),
        ({"model": ""}, "'model' is missing: give model=NAME"),
        ({"model": "nowhere"}, "there is no model 'nowhere'"),
        ({"method": "medusas"}, "did you mean medusa"),
        ({"method": "neural"}, "needs a small language model"),
        ({"batch_size": "auto"}, "batch_size must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"max_length": 97}, r"max_length must be an integer from 2 to 96"),
        ({"precision": "float8"}, "dtype must be one of float32"),
        ({"lattice_width": 0}, "lattice_width must be"),
    ],
)
def test_wrong_arguments_are_refused_at_once(trained, arguments, message):
    with pytest.raises(UserError, match=message):
        HarnessModel(**{"model": str(trained / "run"), **arguments})


@pytest.mark.parametrize("folder, method", [("run", "bpd"), ("plain", "prompt_lookup")])
def test_the_method_suits_the_model(trained, folder, method):
    assert HarnessModel(model=str(trained / folder)).method == method


def test_arguments_may_come_as_the_harness_gives_them(trained):
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
    assert model.lm.loaded.functions.config.trunk.dtype == "bfloat16"
    [text] = model.generate_until([request("3", {"max_gen_toks": 5})])
    assert text


def test_chats_are_rendered_with_the_models_template(harness):
    pytest.importorskip("jinja2")
    from bpd_jax.decoding.loaded_model import Chat

    chat = Chat(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    loaded = dataclasses.replace(harness.lm.loaded, chat=chat)
    talking = changed(harness, loaded)
    asked = [{"role": "user", "content": "3 times 4?"}]
    text = talking.apply_chat_template(asked)
    assert text == "<user>3 times 4?<|endoftext|>\n<assistant>"
    begun = [*asked, {"role": "assistant", "content": "It is "}]
    text = talking.apply_chat_template(begun, add_generation_prompt=False)
    assert text == "<user>3 times 4?<|endoftext|>\n<assistant>It is"
    assert talking.chat_template(True) == chat.template
    assert talking.tokenizer_name == harness.lm.loaded.name
    # The template's special tokens are read as such, and only once.
    begin = loaded.begin_of_text
    assert talking.encode(text).count(begin) == 2
    assert harness.encode(text).count(begin) == 1
    assert talking.encode("<|endoftext|>3") == [begin, *loaded.tokenizer.encode("3")]
    with pytest.raises(UserError, match="one chat template"):
        talking.chat_template("tools")
    with pytest.raises(UserError, match="has no chat template: leave out"):
        harness.apply_chat_template(asked)
