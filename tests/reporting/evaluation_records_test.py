import numpy as np
import pytest

from bpd_jax.decoding.compare import Difference, MethodResult
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import GREEDY
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation.block_views import BlockPath, BlockView
from bpd_jax.reporting import evaluation_records
from bpd_jax.reporting.decode_records import decode_records

PIECES = ["<end>", "a", "b", "c"]


def decode(ids):
    return "".join(PIECES[index] for index in ids)


def generation(accepted):
    """Tokens `a b c …` ended by 0, drafted three at a time."""
    accepted = np.array(accepted)
    output = np.array([1, 2, 3] * 3)[: accepted.sum()]
    output[-1] = 0
    drafts = np.array([[1, 2, -1]] + [[3, 1, 2]] * (len(accepted) - 1))
    calls = len(accepted)
    return Generation(
        input_ids=np.array([0, 2]),
        output_ids=output,
        serial_calls=calls,
        seconds=0.5,
        drafts=drafts,
        accepted=accepted,
        ranks=accepted - 1,
        proposed=np.array([[1, 1, 2]] * calls),
        nodes=np.full(calls, 5),
        entropies=np.array([[0, 1.5, np.nan]] * calls),
    )


def result(method, accepted, differences=()):
    texts = [generation(counts) for counts in accepted]
    return MethodResult(method, method.name.upper(), texts, list(differences))


def test_summaries_sum_over_prompts_and_compare_with_bpd():
    plain, bpd, ngram, oracle = evaluation_records.summaries(
        [
            result(parse_method("greedy"), [[1, 1, 1, 1], [1, 1]]),
            result(parse_method("bpd"), [[2, 2], [1, 1]]),
            result(
                parse_method("ngram:4"),
                [[2, 2], [2]],
                [Difference(0, 1, 0.0, True), Difference(1, 3, 0.5, False)],
            ),
            result(parse_method("oracle"), [[2, 2], [2]]),
        ]
    )
    assert (plain.name, plain.label) == ("greedy", "GREEDY")
    assert (plain.block_efficiency, plain.gain) == (1.0, None)
    assert (bpd.tokens, bpd.serial_calls, bpd.seconds) == (6, 4, 1.0)
    assert (bpd.block_efficiency, bpd.gain) == (1.5, None)
    assert ngram.gain == pytest.approx(2 / 1.5 - 1)
    assert (ngram.differing, ngram.near_ties, ngram.agreement) == (2, 1, "different")
    assert bpd.interval == (1.0, 2.0)
    # The gain over BPD is 0 % on the first prompt and 100 % on the second.
    assert (bpd.gain_interval, ngram.gain_interval) == (None, (0.0, 1.0))
    assert (bpd.divergence, plain.divergence) == (None, None)
    assert ngram.divergence == pytest.approx({"rate": 1, "first": 2, "gap": 0.25})
    assert (bpd.nodes, bpd.repeated, bpd.longest_run) == (5, 0.5, 2)
    assert (bpd.entropies, bpd.accepted) == ([1.5], [0.5, 0.5, 0])
    assert [row.upper_bound for row in (bpd, ngram, oracle)] == [False, False, True]


@pytest.mark.parametrize(
    ("accepted", "why"),
    [
        ([[1], [1]], "no text is longer than one token"),
        ([[1, 1], [1]], "none of its drafted tokens was accepted, in texts of up to 2"),
        ([[1, 2], [1]], None),
    ],
)
def test_an_efficiency_of_one_is_explained(accepted, why):
    [greedy, row] = evaluation_records.summaries(
        [result(GREEDY, [[1], [1]]), result(parse_method("ngram:4"), accepted)]
    )
    assert greedy.note == ""
    assert (why in row.note) if why else row.note == ""


def test_records_contain_every_step_and_the_text_before_a_stop_text():
    piece, texts = PIECES.__getitem__, [generation([2, 3])]
    options = DecodeOptions(end_of_text=(0, 9), stop=("ca",))
    [record] = decode_records("ngram:4", texts, decode, piece, options, ["as typed"])
    assert (record.prompt, record.text) == ("as typed", "ab")
    options = DecodeOptions(end_of_text=0)
    [record] = decode_records("ngram:4", texts, decode, piece, options)
    assert (record.method, record.prompt_index) == ("ngram:4", 0)
    assert (record.prompt, record.text) == ("b", "abca")
    assert (record.input_ids, record.output_ids) == ([0, 2], [1, 2, 3, 1, 0])
    assert [step.draft for step in record.steps] == [["a", "b"], ["c", "a", "b"]]
    assert [(step.accepted, step.rank) for step in record.steps] == [(2, 1), (3, 2)]
    assert record.block_efficiency == 2.5


def test_a_lattice_contains_only_possible_candidates():
    view = BlockView(
        text=np.array([1, 2]),
        tokens=np.array([[3, 0], [1, 2]]),
        log_probs=np.array([[0.0, -np.inf], [-0.5, -1.0]]),
        greedy=np.array([3, 2]),
        paths=[BlockPath("BPD", [0, 0], 1), BlockPath("Oracle", [0, 1], 2)],
    )
    picture = evaluation_records.lattice_picture(view, decode, PIECES.__getitem__)
    pieces = [[c.piece for c in position] for position in picture.positions]
    assert pieces == [["c"], ["a", "b"]]
    assert picture.positions[1][1].log_prob == -1.0
    assert (picture.prompt_tail, picture.greedy) == ("ab", ["c", "b"])
    assert [(p.label, p.accepted) for p in picture.paths] == [("BPD", 1), ("Oracle", 2)]
