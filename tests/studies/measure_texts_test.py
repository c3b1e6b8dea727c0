"""From decoded tokens to records."""

import types

from bpd_jax.studies import measure_texts
from bpd_jax.studies.measure_texts import quality_records
from bpd_jax.studies.study_records import QualityRecord

LOADED = types.SimpleNamespace(
    tokenizer=types.SimpleNamespace(
        decode=lambda ids: "".join("<> abcd"[token] for token in ids), encode=None
    ),
    end_tokens=(0, 1),
    model=None,
    begin_of_text=None,
)


def records_of(task, examples, outputs=()):
    """The records of examples: part, prompt and references of each."""
    examples = [
        types.SimpleNamespace(index=3 + i, part=part, prompt=prompt, references=answers)
        for i, (part, prompt, answers) in enumerate(examples)
    ]
    context = types.SimpleNamespace(
        loaded=lambda _: LOADED,
        examples=lambda _: examples,
        texts=lambda _: [types.SimpleNamespace(output_ids=ids) for ids in outputs],
        config=types.SimpleNamespace(batch_size=2),
    )
    return quality_records(context, task)


def test_texts_are_scored_by_the_metric_of_their_task():
    """`b c` against `b` and `d`: precision 1/2 and recall 1 for `b`."""
    examples = [("report", "", ("b", "d")), ("tune", "", ("d",)), ("report", "", ())]
    outputs = [[4, 2, 5, 0], [2, 6, 1, 5], [4]]
    f1 = 2 / 3
    assert records_of("squad", examples, outputs) == [
        QualityRecord(
            "squad", 3, "report", "b c", ["b", "d"], {"exact_match": 0.0, "f1": f1}
        ),
        QualityRecord("squad", 4, "tune", "d", ["d"], {"exact_match": 1.0, "f1": 1.0}),
    ]
    assert records_of("qa", examples, outputs) == []


def test_last_words_are_the_references_of_passages(monkeypatch):
    scores = [{"log_prob": -1.0}, {"log_prob": -2.0}]
    monkeypatch.setattr(measure_texts, "passage_scores", lambda *a, **k: scores)
    records = records_of("lambada", [("report", "a b", ()), ("tune", "c d e", ())])
    assert [(x.example, x.part, x.references, x.scores) for x in records] == [
        (3, "report", ["b"], scores[0]),
        (4, "tune", ["e"], scores[1]),
    ]
