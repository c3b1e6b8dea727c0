import pytest

from bpd_jax.decoding.methods import Decoder, Method, parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError


@pytest.mark.parametrize(
    "text, method, label",
    [
        ("autoregressive", Method("autoregressive"), "Autoregressive"),
        ("bpd", Method("bpd"), "BPD"),
        ("zero_gram:16", Method("zero_gram", 16), "16-best 0-gram"),
        ("ngram", Method("ngram", 1), "1-best 3-gram"),
        ("ngram:4", Method("ngram", 4), "4-best 3-gram"),
        ("ngram:4@fst", Method("ngram", 4, "fst"), "4-best 3-gram (fst)"),
        ("oracle", Method("oracle"), "Oracle"),
    ],
)
def test_names(text, method, label, make_ngram):
    assert parse_method(text) == method
    assert parse_method(method.name) == method
    assert method.label(make_ngram()) == label


@pytest.mark.parametrize("text", ["", "medusa", "ngram:0", "ngram:", "ngram:x", "BPD"])
def test_unknown_methods_are_refused(text):
    with pytest.raises(UserError, match="unknown method"):
        parse_method(text)


def test_methods_without_drafts_take_no_number():
    with pytest.raises(UserError, match="bpd takes no number of drafts"):
        parse_method("bpd:4")


def test_engines_belong_to_ngram_methods(make_model, make_ngram):
    with pytest.raises(UserError, match="bpd takes no engine"):
        parse_method("bpd@fst")
    with pytest.raises(UserError, match="unknown n-gram engine 'fast'"):
        parse_method("ngram:4@fast")
    functions, params = make_model(0)
    with pytest.raises(UserError, match="unknown n-gram engine 'fast'"):
        Decoder(functions, params, width=4, ngram=make_ngram(), engine="fast")


def test_a_method_must_suit_the_model(make_model, make_ngram):
    functions, params = make_model(0)
    with pytest.raises(UserError, match="needs an n-gram model"):
        Decoder(functions, params, width=4).drafter(parse_method("ngram:2"))
    with pytest.raises(UserError, match="lattice_width is 14"):
        Decoder(functions, params, width=14)
    with pytest.raises(UserError, match="alpha is nan"):
        Decoder(functions, params, width=4, alpha=float("nan"))
    with pytest.raises(UserError, match="has 15 tokens and the language model 13"):
        Decoder(functions, params, width=4, ngram=make_ngram(15))
    plain, params = make_model(0, block_size=1)
    with pytest.raises(UserError, match="no block heads"):
        Decoder(plain, params, width=4).drafter(parse_method("bpd"))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        DecodeOptions(**fields)
