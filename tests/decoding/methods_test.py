import pytest

from bpd_jax.decoding.assets import Assets, SmallModel
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.methods import KINDS, Method, describe_methods, parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError


@pytest.mark.parametrize(
    "text, method, label",
    [
        ("greedy", Method("greedy"), "Greedy"),
        ("bpd", Method("bpd"), "BPD"),
        ("zero_gram:16", Method("zero_gram", 16), "16-best 0-gram"),
        ("ngram:1", Method("ngram", 1), "1-best 3-gram"),
        ("ngram_fst:4", Method("ngram_fst", 4), "4-best 3-gram (fst)"),
        (
            "ngram:4:k=8:alpha=0.5",
            Method("ngram", 4, k=8, alpha=0.5),
            "4-best 3-gram (k 8, alpha 0.5)",
        ),
        (
            "ngram:32:search=best:adaptive=1",
            Method("ngram", 32, search="best", adaptive=1),
            "Tree of 32, 3-gram (adaptive)",
        ),
        (
            "zero_gram:8:search=static",
            Method("zero_gram", 8, search="static"),
            "Tree of 8, 0-gram (search static)",
        ),
        (
            "ngram:1:search=greedy",
            Method("ngram", 1, search="greedy"),
            "Greedy walk, 3-gram",
        ),
        (
            "ngram:16:search=beam",
            Method("ngram", 16, search="beam"),
            "16-best 3-gram (search beam)",
        ),
        ("medusa:32", Method("medusa", 32), "Medusa tree of 32"),
        ("oracle", Method("oracle"), "Oracle"),
    ],
)
def test_names(text, method, label):
    assert parse_method(text) == method
    assert parse_method(method.name) == method
    assert method.name == text
    assert method.label(3) == label


def test_a_size_may_be_left_to_the_method():
    assert parse_method("ngram").name == "ngram:1"
    assert parse_method("medusa").count == 32


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "unknown method ''"),
        ("BPD", "unknown method 'BPD': did you mean bpd|unknown method 'BPD'"),
        ("medusa_ngrams", "did you mean medusa_ngram"),
        ("ngram:0", "'0' is no number of drafts P between 1 and 1024"),
        ("ngram:", "'' is no number"),
        ("ngram:5000", "between 1 and 1024"),
        ("bpd:4", "method bpd takes no number"),
        ("ngram:4:p=3", "'p=3' is no setting of ngram, which takes k, heads, alpha"),
        ("ngram:4:k", "'k' is no setting"),
        ("ngram:4:k=3:k=4", "'k=4' is no setting of ngram.* each once"),
        ("ngram:4:k=0", "k=0 is not allowed; it is candidates per head"),
        ("ngram:4:k=many", "k=many is not allowed; it is candidates per head"),
        (
            "ngram:4:alpha=-1",
            "alpha=-1 is not allowed; it is weight",
        ),
        ("ngram:4:alpha=nan", "alpha=nan is not allowed; it is weight"),
        ("ngram:4:search=greedy", "search=greedy drafts one path: leave the number"),
        ("draft_model:4:drafts=2:search=greedy", "search=greedy drafts one path"),
        ("medusa:8:search=beam", "medusa drafts a tree, so that search is static or"),
        (
            "ngram:4:search=fast",
            "search=fast is not allowed; it is how drafts are",
        ),
    ],
)
def test_unknown_methods_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_method(text)


def test_help_names_every_method_and_setting():
    text = describe_methods()
    for kind in KINDS.values():
        assert f"\n{kind.name}" in text
        assert kind.summary in text
        assert kind.reference in text
    assert "alpha               weight of the second opinion" in text


@pytest.mark.parametrize(
    "name, message",
    [
        ("ngram:2", "needs an n-gram model: build one with"),
        ("medusa_ngram", "needs an n-gram model"),
        ("neural", "needs a small language model"),
        ("draft_model", "needs a smaller language model"),
        ("hydra", "needs a trained hydra refiner: train one with"),
        ("markov", "needs a trained markov refiner"),
        ("zero_gram:65", "asks for 65 drafts, but the lattice of 4 heads and 4"),
        ("zero_gram:4:k=14", "asks for 14 candidates, but there are only 13"),
        ("bpd:heads=5", "asks for 5 heads: give 2 to 4"),
        ("auto", "auto is no method of its own here: name the methods"),
    ],
)
def test_a_method_must_suit_what_there_is(make_model, name, message):
    functions, params = make_model(0)
    decoder = Decoder(functions, params, width=4)
    with pytest.raises(UserError, match=message):
        decoder.drafter(parse_method(name))


def test_a_tree_counts_nodes_where_there_are_few_paths(make_model):
    functions, params = make_model(0)
    decoder = Decoder(functions, params, width=4)
    assert decoder.drafter(parse_method("zero_gram:2:k=1:search=best")).max_nodes == 2
    with pytest.raises(UserError, match="asks for 2 drafts, but the lattice"):
        decoder.drafter(parse_method("zero_gram:2:k=1"))


def test_everything_must_fit_the_model(make_model, make_ngram):
    functions, params = make_model(0)
    with pytest.raises(UserError, match="lattice_width is 14"):
        Decoder(functions, params, width=14)
    with pytest.raises(UserError, match="alpha is nan"):
        Decoder(functions, params, width=4, alpha=float("nan"))
    with pytest.raises(UserError, match="has 15 tokens and the language model 13"):
        Decoder(functions, params, width=4, assets=Assets(ngram=make_ngram(15)))
    small = SmallModel(*make_model(0, vocab_size=15))
    for name in ("rescorer", "draft_model"):
        with pytest.raises(UserError, match="has 15 tokens and the language model 13"):
            Decoder(functions, params, width=4, assets=Assets(**{name: small}))
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
        ({"batch_size": True}, "batch_size is True: it must be a whole number"),
        ({"max_new_tokens": "8"}, "max_new_tokens is '8': it must be a whole number"),
        ({"top_k": 2.0}, "top_k is 2.0: it must be a whole number"),
        ({"seed": 2**32}, "seed is 4294967296: it must be 0 … 4294967295"),
        ({"end_of_text": "</s>"}, "end_of_text is '</s>'"),
        ({"temperature": "hot"}, "temperature is 'hot': it must be a number"),
        ({"stop": (1,)}, r"stop is \(1,\): give a tuple of texts"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"acceptance": "lossy"}, "acceptance is 'lossy': choose from exact"),
        ({"acceptance": "speculative"}, "give a temperature above 0"),
        ({"verification": "none"}, "verification is 'none': choose from tree"),
        ({"stop": ("",)}, "a stop text is empty"),
        ({"stop": "end"}, "stop is one text, 'end': give a tuple"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"acceptance": "typical"}, "typical acceptance samples"),
        ({"typical_epsilon": -0.1}, "typical_epsilon is -0.1"),
        ({"typical_delta": 1.5}, "typical_delta is 1.5"),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        DecodeOptions(**fields)
