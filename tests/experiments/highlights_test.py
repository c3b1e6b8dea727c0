"""The key figures, from two texts with values computed by hand."""

from experiments.highlights import highlights
from tests.experiments import builders


def draft(contender, example, accepted):
    return builders.draft(contender, "squad", accepted, example=example)


def run(study, records, **facts):
    labels = {"ngram:4": "4-best 4-gram"}
    return builders.run_of(study, records, ("squad",), labels=labels, **facts)


# 8 tokens in all: BPD calls 4 + 2 times, the n-grams 2 + 2, the oracle 1 + 1.
RECORDS = [
    draft("bpd", 0, "1111"),
    draft("bpd", 1, "2121"),
    draft("ngram:4", 0, "2121"),
    draft("ngram:4", 1, "2121"),
    draft("zero_gram:4", 0, "4321"),
    draft("oracle", 0, "4321"),
    draft("oracle", 1, "4321"),
]


def test_the_best_on_all_texts_is_compared_with_bpd_and_the_oracle():
    figures = {f.name: f for f in highlights([run("table4", RECORDS)])}
    assert figures["BPD"].value == f"{8 / 6:.2f}"
    assert "2 texts of 1 task" in figures["BPD"].note
    # The 0-gram is better on one text, but was not measured on the other.
    assert figures["Best of Table 4"].value == "2.00"
    assert figures["Best of Table 4"].note.startswith("4-best 4-gram: +50.0 % (")
    assert figures["Oracle"].value == "4.00"
    # (2 - 4/3) / (4 - 4/3) = 1/4
    assert figures["Headroom taken"].value == "25 %"


def test_the_run_of_table_4_with_the_most_texts_comes_first():
    for study in ("table3", "table4"):
        other = run(study, [draft("bpd", 0, "4321")])
        assert highlights([other, run("table4", RECORDS)])[0].value == "1.33"


def test_independent_heads_come_before_a_block_drafter_with_more_texts():
    heads = run("table4", RECORDS[2:3] + RECORDS[:1], size="mine")
    block = run("table4", RECORDS, settings={"source": "block"})
    assert highlights([heads, block])[0].name == "BPD, mine"
