"""Settings and records of studies."""

import dataclasses
import json
import lzma
import pathlib

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.studies import run_files
from bpd_jax.studies.results import ContenderDrafts, StudyRun
from bpd_jax.studies.study_config import StudyConfig
from bpd_jax.studies.study_records import (
    Call,
    DraftRecord,
    ExplorerRecord,
    LatencyRecord,
    TimingRecord,
    Trace,
)
from tests.json_lines import write_json_lines


def config(**changes):
    fields = {"study": "table4", "model": "demo", "tasks": ["held_out"]}
    return StudyConfig(**{**fields, **changes})


def test_same_settings_give_the_same_texts():
    """Other contenders, tasks or labels change no text; lengths do."""
    base = config(contenders=["ngram:1"])
    same_lengths = config(contenders=["bpd"], tasks=["squad"], shown=3)
    assert base.same_texts(json.loads(json.dumps({"settings": same_lengths.settings})))
    assert not base.same_texts({"settings": config(max_new_tokens=99).settings})
    assert not base.same_texts({})
    # Records of earlier versions have no lengths by task.
    earlier = {k: v for k, v in same_lengths.settings.items() if k != "decode_lengths"}
    assert base.same_texts({"settings": earlier})
    longer = config(decode_lengths={"held_out": 9})
    assert longer.new_tokens("held_out") == 9
    assert longer.new_tokens("squad") == base.max_new_tokens
    assert not longer.same_texts({"settings": earlier})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tasks": []}, "tasks is empty"),
        ({"contenders": ["bpd", "bpd"]}, "without repetition"),
        ({"contenders": ["ngram:1@own"]}, "requires the set 'own'"),
        ({"assets": {"own": {"ngrams": "a"}}}, "unknown kind 'ngrams'"),
        ({"speculative": ["bpd"]}, "speculative names 'bpd'"),
        ({"tuners": {"ngram": "neural:1"}}, "to a contender of that class"),
        ({"tuners": {"trees": "medusa:4"}}, "the classes ngram, neural"),
        ({"tuners": {"ngram": "ngram:1:alpha=2"}}, "class without alpha"),
        ({"tuners": {"ngram": "ngram:1"}, "alphas": [-1.0]}, "alphas must be a list"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        config(**changes)


def draft(accepted="21321", example=0, contender="bpd", part="report", **changes):
    fields = {"task": "squad", "length": "33333", "equal": "01002", "longest": "12113"}
    fields |= {"example": example, "part": part, "contender": contender, "nodes": 9}
    return DraftRecord(accepted=accepted, **{**fields, **changes})


def test_a_gain_is_in_percent():
    """9 tokens in 6 calls against 9 in 9."""
    base = [draft("11111"), draft("1111")]
    drafts = ContenderDrafts([draft(), draft("1111")])
    cell = drafts.gain(ContenderDrafts(base), paper=7.0)
    assert cell.value == pytest.approx(50.0)
    assert cell.paper == 7.0
    low, high = cell.interval
    assert low == 0.0  # only the second example drawn
    assert high == pytest.approx(150.0)  # only the first


def test_repetition_counts_the_drafts_at_all_positions():
    """0 + 1 + 0 + 0 + 2 of 5 · 2 pairs, runs 1, 2, 1, 1, 3, wherever calls are."""
    assert ContenderDrafts([draft()]).repetition == (0.3, 1.6)
    assert ContenderDrafts([draft("11111")]).repetition == (0.3, 1.6)
    # A draft of one token has no neighbours.
    short = draft("11111", length="13311", longest="12111")
    assert ContenderDrafts([short]).repetition == (3 / 4, 1.5)
    assert ContenderDrafts([draft("11", length="11")]).repetition == (None, None)


def test_records_round_trip_in_order(tmp_path):
    run_files.write_header(tmp_path, "table4", {"tasks": {"xsum": "X", "squad": "S"}})
    latency = LatencyRecord("fst", 8, 16, 1, [1.5, 2.0])
    run_files.append_records(tmp_path, [draft(example=1), draft(part="tune")])
    run_files.append_records(tmp_path, [draft(), draft(task="xsum"), latency])
    call = Call(at=0, draft=[0], winner=[0], accepted=1, rank=0)
    traces = [Trace("bpd", "BPD", [call])]
    text = ExplorerRecord("qa", 0, "", ["a"], [0], [[[0]]], [[[-0.5]]], traces)
    timing = TimingRecord("qa", 0, "bpd", 0.0, 0, 8, 4, 1, identical=None)
    run_files.append_records(tmp_path, [text, timing])
    run = run_files.open_run(tmp_path)
    assert run.of(ExplorerRecord) == [text]
    assert run.of(TimingRecord) == [timing]
    assert run.study == "table4"
    assert run.of(LatencyRecord) == [latency]
    assert [*run.drafts("bpd")] == [draft(task="xsum"), draft(), draft(example=1)]
    assert [*run.drafts("bpd", "squad", "tune")] == [draft(part="tune")]
    assert run.task_label("squad") == "S"
    assert run.label("bpd") == "bpd"


def test_a_text_of_the_explorer_with_further_contenders_replaces_the_earlier_one(
    tmp_path,
):
    run_files.write_header(tmp_path, "figure4", {})
    earlier, later, other = (
        ExplorerRecord(
            "qa", example, "", ["a"], [0], [[[0]]], [[[-0.5]]], [Trace(name, name, [])]
        )
        for example, name in ((0, "bpd"), (0, "ngram:16"), (1, "bpd"))
    )
    published = tmp_path / "published"
    run_files.append_records(tmp_path, [earlier, other])
    run_files.publish(run_files.open_run(tmp_path), published)
    for folder in (tmp_path, published):
        run_files.append_records(folder, [later])
        assert run_files.open_run(folder).records == [other, later]


def test_an_incomplete_line_is_dropped(tmp_path):
    run_files.write_header(tmp_path, "table4", {})
    run_files.append_records(tmp_path, [draft()])
    path = tmp_path / run_files.RECORDS
    path.write_bytes(path.read_bytes() + b'{"kind":"dra')
    assert run_files.open_run(tmp_path).records == [draft()]
    run_files.append_records(tmp_path, [draft(example=1)])
    assert run_files.open_run(tmp_path).records == [draft(), draft(example=1)]
    # A longer one than the block that is read first.
    path.write_bytes(path.read_bytes() + b"x" * 200_000)
    run_files.append_records(tmp_path, [draft(example=2)])
    examples = [record.example for record in run_files.open_run(tmp_path).records]
    assert examples == [0, 1, 2]
    path.write_bytes(b"x" * 200_000)
    run_files.append_records(tmp_path, [draft()])
    assert run_files.open_run(tmp_path).records == [draft()]


def test_shards_are_read_together_and_published(tmp_path):
    """The published bytes do not depend on the order of the records."""
    published = []
    for number, files in enumerate([("records-0-of-2.jsonl",), ("records.jsonl",)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        run_files.write_header(folder, "table4", {"size": "tiny"})
        run_files.append_records(folder, [draft(example=2)], files[0])
        run_files.append_records(folder, [draft(example=1)], "records-1-of-2.jsonl")
        run = run_files.open_run(folder)
        assert len(run.records) == 2
        output = tmp_path / f"published{number}"
        run_files.publish(run, output)
        published.append((output / "records.jsonl.xz").read_bytes())
        assert run_files.open_run(output).facts == {"size": "tiny"}
    assert published[0] == published[1]
    assert lzma.decompress(published[0]).count(b"\n") == 2


LINE = {**dataclasses.asdict(draft()), "kind": "draft"}


@pytest.mark.parametrize(
    "line",
    [
        [],
        {"kind": "none"},
        {**LINE, "task": 3},
        {**LINE, "nodes": 2**64},
        {**LINE, "entropy_counts": [3]},
    ],
    ids=str,
)
def test_damaged_records_are_refused(line, tmp_path):
    run_files.write_header(tmp_path, "table4", {})
    write_json_lines(tmp_path / run_files.RECORDS, [LINE, line])
    with pytest.raises(UserError, match=r"records\.jsonl:2 is not a study record"):
        run_files.open_run(tmp_path)


def test_invalid_results_are_refused(tmp_path):
    with pytest.raises(UserError, match="has no study results"):
        run_files.open_run(tmp_path)
    (tmp_path / run_files.HEADER).write_text("[1]")
    with pytest.raises(UserError, match="cannot read"):
        run_files.open_run(tmp_path)
    run_files.write_header(tmp_path, "table4", {})
    for ending in ("gz", "xz"):
        path = tmp_path / f"records.jsonl.{ending}"
        path.write_bytes(b"not compressed")
        with pytest.raises(UserError, match=rf"cannot read .*records\.jsonl\.{ending}"):
            run_files.open_run(tmp_path)
        path.unlink()


def run_of(*keys):
    """Records of (contender, task, example) and perhaps part."""
    records = [
        DraftRecord(task, example, *(part or ["report"]), name, "1", "1", "0", "1", 1)
        for name, task, example, *part in keys
    ]
    return StudyRun(pathlib.Path(), "table4", {"tasks": {"a": "A", "b": "B"}}, records)


def test_only_shared_examples_are_compared():
    run = run_of(
        ("bpd", "b", 0),
        ("bpd", "a", 2),
        ("bpd", "a", 1),
        ("ngram:1", "a", 1),
        ("ngram:1", "a", 2, "tune"),
        ("ngram:1", "b", 0),
        ("ngram:1", "b", 1),
    )
    assert run.contenders == ["bpd", "ngram:1"]
    paired = run.paired(["bpd", "ngram:1"])
    expected = [("a", 1), ("b", 0)]
    assert [[(r.task, r.example) for r in records] for records in paired] == [
        expected
    ] * 2
    assert [*map(len, run.paired(["bpd", "ngram:1"], "a", "tune"))] == [0, 0]


def test_the_oracle_is_the_widest_of_all_heads():
    run = run_of(
        ("oracle:k=2", "a", 1), ("oracle:k=16", "a", 1), ("oracle:heads=3", "a", 1)
    )
    assert run.oracle == "oracle:k=16"
    assert run_of(("oracle", "a", 1), ("oracle:k=4", "a", 1)).oracle == "oracle"
    assert run_of(("bpd", "a", 1)).oracle is None
