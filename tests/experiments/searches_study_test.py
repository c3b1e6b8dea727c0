"""Scores and searches, from small records with values computed by hand."""

from tests.experiments import builders

ONE, TWO, FOUR = "1111", "2121", "4321"
"""Accepted tokens of a draft at each position of a text: 1, 2 or 4 per call."""


def draft(contender, accepted, example=0, nodes=10):
    return builders.draft(contender, "squad", accepted, example=example, nodes=nodes)


def exhibit_of(records):
    labels = {record.contender: record.contender.upper() for record in records}
    return builders.exhibit_of("searches", records, ("squad",), labels=labels)


def findings_of(accepted, texts=8):
    """Findings by statement, of contenders with equal drafts on every text."""
    drafts = [
        draft(name, lengths, example)
        for name, lengths in accepted.items()
        for example in range(texts)
    ]
    return {finding.statement: finding for finding in exhibit_of(drafts).findings}


def verdicts(accepted, start):
    """Whether the findings hold that begin so, by the rest of their statements."""
    return {
        statement.removeprefix(start): finding.holds
        for statement, finding in findings_of(accepted).items()
        if start in statement
    }


def test_searches_are_a_grid():
    accepted = {
        "markov:64:search=best": FOUR,
        "ngram:1:search=greedy": ONE,
        "ngram:1": TWO,
        "ngram:64:search=best": FOUR,
        "markov:1": ONE,
        "neural:16": "3211",
        "medusa:64": ONE,
        "ngram:16:k=4": ONE,
        "medusa_neural:64:order=block": TWO,
        "medusa_neural:64": FOUR,
    }
    drafts = [draft(name, lengths) for name, lengths in accepted.items()]
    drafts += [draft("bpd", "1111", nodes=8), draft("ngram:16", TWO, nodes=40)]
    grid, all_contenders = exhibit_of(drafts).tables
    labels = [column.label for column in grid.columns]
    assert labels[:3] == ["greedy walk", "exact 1-best", "beam of 16"]
    assert labels[3:5] == ["exact 16-best", "static tree of 64"]
    assert labels[5:] == ["tree of 64"]
    assert builders.values_of(grid) == {
        "n-gram": [1.0, 2.0, None, 2.0, None, 4.0],
        "Markov head": [None, 1.0, None, None, None, 4.0],
        "small LM": [None, None, 2.0, None, 4.0, None],
        "small LM, block refined first": [None, None, None, None, 2.0, None],
        "0-gram": [None, None, None, None, 1.0, None],
        "n-gram, k 4": [None, None, None, 1.0, None, None],
    }
    cells = {row.label: row.cells[2].value for row in all_contenders.rows}
    assert cells["BPD"] == 2.0
    assert cells["NGRAM:16"] == 20.0


def test_every_score_is_compared_with_the_heads_alone():
    accepted = {
        "zero_gram:1": ONE,
        "zero_gram:16": TWO,
        "zero_gram:64:search=best": TWO,
        "ngram:1:search=greedy": TWO,
        "ngram:16:search=beam": ONE,
        "ngram:16": TWO,
        "ngram:64:search=best": ONE,
        "ngram:64:search=best:adaptive=1": FOUR,
        "ngram:64:search=best:k=4": FOUR,
        "ngram:16:search=best": FOUR,
    }
    # No unrefined tree has 16 nodes, and no unrefined tree of 64 has 4 candidates.
    start = "Refined drafts beat unrefined ones "
    assert verdicts(accepted, start) == {
        "(greedy walk, n-gram).": True,
        "(beam of 16, n-gram).": False,
        "(exact 16-best, n-gram).": None,
        "(tree of 64, n-gram).": False,
        "(tree of 64, n-gram, with the text's own bigrams).": True,
    }
    evidence = findings_of(accepted)[f"{start}(tree of 64, n-gram)."].evidence
    assert evidence.startswith(
        "1.000 against 2.000 tokens per call, −50.0 % (−50.0 … −50.0) over 8 texts;"
    )


def test_trained_scores_are_compared_at_equal_searches_and_nodes():
    accepted = {
        "ngram:1": TWO,
        "markov:1": ONE,
        "neural:1": FOUR,  # a greedy walk; no untrained one was measured
        "zero_gram:64:search=best": ONE,
        "ngram:64:search=best": TWO,
        "neural:16:search=best": FOUR,
        "neural:64:search=best": TWO,
        "markov:64:search=best": FOUR,
    }
    assert verdicts(accepted, "Trained refiners beat those that need no training ") == {
        "(exact 1-best: MARKOV:1 against NGRAM:1).": False,
        "(tree of 64: MARKOV:64:SEARCH=BEST against NGRAM:64:SEARCH=BEST).": True,
    }
