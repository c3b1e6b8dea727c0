from bpd_jax.studies.study_records import Call, ExplorerRecord, Trace
from experiments.figure4.study import blocks_of, refined_contender
from tests.experiments.builders import exhibit_of

A, B, C, D, X, Y = range(6)


def trace(contender, *calls):
    return Trace(contender, contender, [Call(*call) for call in calls])


def text(task="squad", example=0, output=(A, B, C, D), second=(X, B), third=(C, Y)):
    """Three heads; heads 2 and 3 have the same candidates at every position.

    BPD drafts the first candidates after the certain token; the refined method those of
    its trace.
    """
    heads = [list(second), list(third)]
    drafted = [output[0], B, C]
    equal = [a == b for a, b in zip(drafted, output, strict=False)]
    right = (*equal, False).index(False)
    return ExplorerRecord(
        task=task,
        example=example,
        prompt="Once ",
        pieces=["a", "b", "c", "d\n", "x", "y"],
        output=list(output),
        candidates=[heads] * len(output),
        log_probs=[[[-0.5, -1.5], [-0.2, -2.0]]] * len(output),
        traces=[
            trace(
                "bpd",
                *(
                    (at, *[[output[at], second[0], third[0]]] * 2, 1, 0)
                    for at in (0, 1)
                ),
            ),
            trace("ngram:2@own", (0, [output[0], X, C], drafted, right, 1)),
            trace("oracle", (0, drafted, drafted, right, 0)),
        ],
    )


def build_exhibit(*records):
    labels = {"bpd": "BPD", "ngram:2@own": "2-best 2-gram"}
    return exhibit_of("figure4", records, ("qa", "squad"), labels=labels)


def paths(*arguments, **changes):
    """Candidates and accepted tokens of BPD, the refined method and the oracle."""
    block = next(blocks_of(text(*arguments, **changes), "ngram:2@own"))
    return [(path.candidates, path.accepted) for path in block.view.paths]


def test_accepted_tokens_are_those_of_greedy_decoding():
    # Text a b c d, candidates of the heads x b and c y: BPD drafts a x c, of which one
    # token is right, the refined method a b c, of which all three are.
    assert paths() == [([0, 0, 0], 1), ([0, 1, 0], 3), ([0, 1, 0], 3)]
    assert next(blocks_of(text(), "ngram:2@own")).view.gain == (2, 3)
    # The third head does not have d: the oracle falls back on its best candidate.
    assert paths(output=(A, B, D, C))[2] == ([0, 1, 0], 2)


def test_a_path_ends_where_the_draft_leaves_the_lattice():
    # Accepted tokens must be in the lattice; here the second head's b is missing.
    assert list(blocks_of(text(second=(X, Y)), "ngram:2@own")) == []
    # Rejected tokens may be missing: the text is a b d c, and the draft's c is.
    assert paths(output=(A, B, D, C), third=(D, Y))[1] == ([0, 1], 2)


def test_the_refined_contender_with_the_fewest_calls_is_shown():
    record = text()
    record.traces.append(trace("neural:1", *[(at, [A], [A], 1, 0) for at in range(4)]))
    assert refined_contender([record]) == "ngram:2@own"
    # The oracle does not count, nor a contender that did not decode every text.
    assert refined_contender([text(), record]) == "ngram:2@own"
    record.traces[:] = [t for t in record.traces if t.contender != "ngram:2@own"]
    assert refined_contender([text(), record]) is None


def test_blocks_are_chosen_by_gain_then_by_the_order_of_tasks():
    exhibit = build_exhibit(
        text("squad", 7),
        text("squad", 4),
        text("qa", 1, output=(A, B, D, C)),
    )
    # SQuAD gains two tokens, in example 4 first; QA's best gains one.
    blocks = "SQUAD, example 4, token 1; QA, example 1, token 1."
    assert f"The lattices are those of {blocks}" in exhibit.notes
    picture = exhibit.lattices[0]
    pieces = ["".join(c.piece for c in column) for column in picture.positions]
    assert (picture.prompt_tail, picture.greedy) == ("Once ", ["a", "b", "c"])
    assert pieces == ["a", "xb", "cy"]
    assert [(p.label, p.candidates, p.accepted) for p in picture.paths] == [
        ("BPD", [0, 0, 0], 1),
        ("2-best 2-gram", [0, 1, 0], 3),
        ("Oracle", [0, 1, 0], 3),
    ]


def test_the_oracle_is_compared_at_shared_positions():
    # At 0 BPD yields 1 token, the refined method and the oracle 3; BPD also calls at
    # 1, where the oracle does not.
    record = text()
    assert [call.accepted for t in record.traces for call in t.calls] == [1, 1, 3, 3]
    bounded = build_exhibit(record).findings[0]
    assert bounded.holds is True
    assert bounded.evidence == (
        "2 calls of 2 methods at positions where the oracle was called too: it has "
        "more accepted tokens in 1, equally many in 1, fewer in 0."
    )
    # An oracle that misses a token is detected.
    worse = text()
    worse.traces[2] = trace("oracle", (0, [A, B], [A, B], 2, 0))
    assert build_exhibit(record, worse).findings[0].holds is False
    # Drafts from other sources are not bounded.
    worse.traces[1] = trace("prompt_lookup:4", (0, [A, B, C], [A, B, C], 3, 0))
    assert build_exhibit(record, worse).findings[0].holds is True
