import pytest

from bpd_jax.decoding.method_text import parse_method
from experiments.refinements import unrefined
from experiments.searches.study import score_of, search_key

OTHERS = ["greedy", "bpd:heads=4", "bpd", "medusa:32", "medusa:8", "prompt_lookup:8"]


@pytest.mark.parametrize(
    "contender, base",
    [
        ("ngram:16@general_2", "bpd"),
        ("ngram:1:heads=4", "bpd:heads=4"),
        ("medusa_ngram:8:search=static", "medusa:8"),
        ("medusa_neural:8:order=block", "medusa:8"),
        ("medusa_neural:16", None),  # No tree of 16 nodes was measured.
        ("zero_gram:16", None),
        ("prompt_lookup:8", None),
        ("bpd", None),
    ],
)
def test_unrefined_counterparts(contender, base):
    assert unrefined(contender, OTHERS) == base


LOOKUP = "medusa_ngram:8:search=best:lookup=8"


@pytest.mark.parametrize(
    "contender, others, base",
    [
        ("medusa_ngram:8:lookup=8", ["medusa:8", "medusa:8:lookup=8"], 1),
        ("medusa_ngram:8:lookup=8", ["medusa:8", "medusa:8:lookup=4"], None),
        ("medusa_ngram:8", ["medusa:8:lookup=8"], None),
        # The gain of another search, or of more candidates, is not one of refinement.
        (LOOKUP, ["medusa:8:lookup=8", "medusa:8:search=best:lookup=8"], 1),
        (LOOKUP, ["medusa:8", "medusa:8:search=best", "medusa:8:lookup=8"], None),
        ("medusa_ngram:8:k=4", ["medusa:8", "medusa:8:k=4"], 1),
    ],
)
def test_counterparts_have_the_same_lookup_and_search(contender, others, base):
    assert unrefined(contender, others) == (None if base is None else others[base])


def composed(contender):
    method, at, assets = contender.partition("@")
    return parse_method(method).composed + at + assets


@pytest.mark.parametrize(
    "contender, search, score",
    [
        ("neural:4", "beam of {}", "small LM"),
        ("neural:4:mode=parallel", "exact {}-best", "small LM, parallel"),
        ("markov:4", "exact {}-best", "Markov head"),
        ("ngram:1", "exact 1-best", "n-gram"),
        ("neural_ngram:1", "greedy walk", "n-gram + small LM"),
        ("medusa_neural:8", "static tree of {}", "small LM"),
    ],
)
def test_a_search_is_exact_if_the_refiners_allow_it(contender, search, score):
    for name in (contender, composed(contender)):
        assert (search_key(name)[0], score_of(name)) == (search, score)
