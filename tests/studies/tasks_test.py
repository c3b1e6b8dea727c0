"""Examples of studies: prompts, truncated documents, and reproducible sampling."""

import types

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.studies.conversations import later_turns
from bpd_jax.studies.tasks import (
    MT_BENCH,
    TASK_LABELS,
    draw_examples,
    read_sources,
    undrawn_texts,
)
from tests.json_lines import write_json_lines


class Words:
    """A tokenizer whose tokens are words."""

    def __init__(self):
        self.words = []

    def encode(self, text):
        for word in text.split(" "):
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split(" ")]

    def decode(self, tokens):
        return " ".join(self.words[token] for token in tokens)


@pytest.fixture
def loaded():
    """A stub of a model without a chat template, with a tokenizer only."""
    tokenizer = Words()
    model = types.SimpleNamespace(
        tokenizer=tokenizer, chat=None, encode_prompt=tokenizer.encode
    )
    model.without_chat = lambda: model
    return model


def write(folder, name, split, records):
    write_json_lines(folder / name / f"{split}.jsonl.gz", records)


def draw(folder, task, loaded, **changes):
    """Examples of a task in a folder, by default any number of any length."""
    limits = {"examples": 99, "tune": 0, "longest": 99, "longest_whole": 99}
    sources = [*read_sources(folder, task)]
    return draw_examples(sources, loaded, **{**limits, **changes})


def squad(number):
    return {
        "question": f"who {number}?",
        "context": f"it {number} was a long time ago that {{this}} happened",
        "answers": {"text": [f"he {number}", "she"], "answer_start": [0, 1]},
    }


def test_squad_prompts_and_references(tmp_path, loaded):
    write(tmp_path, "squad", "validation", [squad(0), {**squad(1), "context": ""}])
    (example,) = draw(tmp_path, "squad", loaded)  # the other has an empty context
    assert example.prompt == (
        "question: who 0? context: it 0 was a long time ago that {this} happened\n"
    )
    assert example.references == ("he 0", "she")
    assert loaded.tokenizer.decode(example.input_ids) == example.prompt


def test_documents_are_truncated_but_not_templates(tmp_path, loaded):
    record = {"dialogue": "a b c d e f g h", "summary": "s"}
    write(tmp_path, "samsum", "test", [record])
    (example,) = draw(tmp_path, "samsum", loaded, longest=12, longest_whole=1)
    assert example.prompt == "Here is a dialogue: a b c d e\nWrite a short summary!\n"
    assert len(example.input_ids) <= 12
    assert draw(tmp_path, "samsum", loaded, longest=3) == []


def test_draw_is_reproducible_and_parts_are_disjoint(tmp_path, loaded):
    write(tmp_path, "squad", "validation", [squad(n) for n in range(20)])
    draws = [draw(tmp_path, "squad", loaded, examples=6, tune=3) for _ in range(2)]
    assert [e.prompt for e in draws[0]] == [e.prompt for e in draws[1]]
    assert [e.part for e in draws[0]] == ["tune"] * 3 + ["report"] * 6
    assert len({e.prompt for e in draws[0]}) == 9
    sources = [*read_sources(tmp_path, "squad")]
    undrawn = [*undrawn_texts(sources, draws[0], 100)]
    assert len(undrawn) == 11
    assert not any(
        text.split("\n")[0] in e.prompt for text in undrawn for e in draws[0]
    )
    assert [*undrawn_texts(sources, draws[0], 2)] == undrawn[:2]


def test_every_question_on_a_document_is_drawn_and_a_repeated_record_once(
    tmp_path, loaded
):
    second_question = {**squad(0), "question": "what?"}
    records = [squad(0), second_question, squad(0)]
    write(tmp_path, "squad", "validation", records)
    drawn = draw(tmp_path, "squad", loaded)
    assert {example.prompt.split("?")[0] for example in drawn} == {
        "question: who 0",
        "question: what",
    }
    assert len(drawn) == 2
    sources = [*read_sources(tmp_path, "squad")]
    # The document of a drawn question is not trained on.
    assert [*undrawn_texts(sources, drawn[:1], 9)] == []
    assert len([*undrawn_texts(sources, [], 9)]) == 2


def test_spec_bench_has_six_categories(tmp_path, loaded):
    records = [
        {"category": "rag", "turns": ["facts question?"], "reference": [["r", "s"]]},
        {"category": "roleplay", "turns": ["be a cat", "now a dog"]},
        {
            "category": "summarization",
            "turns": ["Summarize: a b c d"],
            "reference": ["a c", "never asked"],
        },
    ]
    write(tmp_path, "spec_bench", "test", records)
    (rag,) = [*read_sources(tmp_path, "rag")]
    assert (rag.document, rag.before) == ("", "facts question?")
    assert rag.references == ("r", "s")
    (conversation,) = [*read_sources(tmp_path, "mt_bench")]
    assert conversation.before == "be a cat"
    assert conversation.follow_ups == ("now a dog",)
    (roleplay,) = [*read_sources(tmp_path, "roleplay")]
    assert (roleplay.task, roleplay.before) == ("roleplay", "be a cat")
    assert [*read_sources(tmp_path, "writing")] == []
    assert len(MT_BENCH) == 8
    (article,) = [*read_sources(tmp_path, "summarization")]
    assert (article.document, article.before) == ("a b c d", "Summarize: ")
    assert article.references == ("a c",)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="there is no task 'squat': use lambada"):
        [*read_sources(tmp_path, "squat")]
    with pytest.raises(UserError, match=r"xsum has none of test\.jsonl\.gz"):
        [*read_sources(tmp_path, "xsum")]
    (tmp_path / "xsum").mkdir()
    for line in ("nothing", "[" * 100_000, '{"document": NaN}'):
        (tmp_path / "xsum" / "test.jsonl").write_text(f"{line}\n")
        with pytest.raises(UserError, match=r"test\.jsonl:1 is not valid JSON"):
            [*read_sources(tmp_path, "xsum")]
    assert "held_out" in TASK_LABELS


def test_later_turns_follow_the_answers_of_the_model(tmp_path, loaded):
    """Two conversations of two turns, one of one; `word of A` is the answer to A."""
    turns = [["a b", "c"], ["d"], ["e f", "g h"]]
    records = [{"category": "stem", "turns": texts} for texts in turns]
    write(tmp_path, "spec_bench", "test", records)
    first = draw(tmp_path, "stem", loaded, examples=2, tune=1)
    answered_prompts = []

    def encode(messages):
        assert [message["role"] for message in messages] == ["user", "assistant"] * (
            len(messages) // 2
        ) + ["user"]
        return loaded.tokenizer.encode(" ".join(m["content"] for m in messages))

    def answer(prompts):
        answered_prompts.extend(loaded.tokenizer.decode(prompt) for prompt in prompts)
        return [f"word of {loaded.tokenizer.decode(p).strip()}" for p in prompts]

    chat_model = types.SimpleNamespace(encode_prompt=encode)
    later = later_turns(first, answer, chat_model, turns=2, longest=99)
    first_prompts = [example.prompt for example in first if example.follow_ups]
    assert answered_prompts == first_prompts
    assert [example.index for example in later] == [3, 4]
    assert [example.part for example in later] == [
        example.part for example in first if example.follow_ups
    ]
    for example, first_prompt in zip(later, first_prompts, strict=True):
        follow_up = example.follow_ups[0]
        text = f"{first_prompt} word of {first_prompt.strip()} {follow_up}"
        assert loaded.tokenizer.decode(example.input_ids) == text
        assert example.references == ()
    # Longer prompts are omitted; without later turns no answers are needed.
    shortest = min(len(example.input_ids) for example in later)
    assert len(later_turns(first, answer, chat_model, turns=2, longest=shortest)) == 1
    assert later_turns(first, None, chat_model, turns=1, longest=99) == []
    # No conversation has a third turn.
    assert len(later_turns(first, answer, chat_model, turns=3, longest=99)) == 2


def test_a_lone_surrogate_is_refused_before_anything_is_decoded(tmp_path):
    """The records of a study, which contain the references, are UTF-8."""
    record = {"dialogue": "a", "summary": "\\ud83d\\ude00 \ud800"}
    write(tmp_path, "samsum", "test", [record])
    with pytest.raises(UserError, match=r"test\.jsonl\.gz:1 is not valid JSON"):
        [*read_sources(tmp_path, "samsum")]
    write(tmp_path, "samsum", "test", [{**record, "summary": "😀"}])
    (source,) = read_sources(tmp_path, "samsum")
    assert source.references == ("😀",)
