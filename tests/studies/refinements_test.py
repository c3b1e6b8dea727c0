import pytest

from bpd_jax.studies.refinements import unrefined

OTHERS = ["greedy", "bpd:heads=4", "bpd", "medusa:32", "medusa:8", "prompt_lookup:8"]


@pytest.mark.parametrize(
    "contender, base",
    [
        ("ngram:16@general_2", "bpd"),
        ("neural:1", "bpd"),
        ("ngram:1:heads=4", "bpd:heads=4"),
        ("medusa_ngram:8:lookup=8@own", "medusa:8"),
        ("medusa_neural:16", None),  # No tree of 16 nodes was measured.
        ("zero_gram:16", None),
        ("prompt_lookup:8", None),
        ("draft_model:4", None),
        ("bpd", None),
    ],
)
def test_every_refined_method_knows_what_it_refines(contender, base):
    assert unrefined(contender, OTHERS) == base
