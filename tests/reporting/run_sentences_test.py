"""Sentences that describe runs, with numbers counted by hand."""

from bpd_jax.reporting import run_sentences
from bpd_jax.reporting.exhibits import Exhibit

SETTINGS = {"max_new_tokens": 64, "lattice_width": 16, "rounds": 3}


def run(title, counts, **facts):
    examples = {task: {"report": n, "tune": m} for task, (n, m) in counts.items()}
    facts = {"size": "smollm2", "model": "smollm2", "settings": SETTINGS, **facts}
    return Exhibit(title, title, "", "", facts={**facts, "examples": examples})


def test_studies_with_equal_settings_share_a_sentence():
    exhibits = [
        run("Table 8", {"squad": (24, 12)}),
        run("Table 4", {"squad": (24, 12), "rag": (15, 12)}),
        run("Table E", {"rag": (3, 0)}, settings={"max_new_tokens": 32}),
        run("Table 4", {"squad": (2, 0)}, size="tiny", model="demo", heads=3),
    ]
    assert run_sentences.sentences(exhibits) == [
        "smollm2: 39 reported texts (15 to 24 of each of 2 tasks), 24 tuning texts, "
        "drawn with a fixed random seed; up to 64 decoded tokens per text; 16 "
        "candidates per head.",
        "smollm2 (Table E): 3 reported texts (3 of one task), drawn with a fixed "
        "random seed; up to 32 decoded tokens per text.",
        "tiny · demo: 3 heads; 2 reported texts (2 of one task), drawn with a fixed "
        "random seed; up to 64 decoded tokens per text; 16 candidates per head.",
    ]


def test_a_block_drafter_is_named_instead_of_the_heads():
    settings = {**SETTINGS, "source": "block"}
    facts = {"settings": settings, "trunk": "30 layers", "heads": 9}
    counts = {"rag": (15, 0)}
    known = run("Table 4", counts, **facts, block_size=7)
    unknown = run("Table E", counts, **facts, block_size=None)
    shorter = run("Table 5", counts, **facts, block_size=3)
    (sentence,) = run_sentences.sentences([unknown])
    assert sentence.startswith("smollm2: 30 layers, block drafter; 15 reported")
    first, second = run_sentences.sentences([unknown, known, shorter])
    assert first.startswith("smollm2: 30 layers, block drafter, L = 7; 15 reported")
    assert second.startswith("smollm2 (Table 5): 30 layers, block drafter, L = 3;")
    assert "16 candidates per position" in first
    heads = [
        run("Table 11", counts, heads=9, block_size=9),
        run("Table 12", counts, heads=9, settings={**SETTINGS, "source": "heads"}),
    ]
    (with_heads,) = run_sentences.sentences(heads)
    assert with_heads.startswith("smollm2: 9 heads; 15 reported")
    assert "heads" not in sentence + first + second


def test_other_counts_of_a_task_need_a_sentence():
    exhibits = [run("Table 4", {"rag": (15, 12)}), run("Table 5", {"rag": (9, 12)})]
    first, second = run_sentences.sentences(exhibits)
    assert first.startswith("smollm2: 15 reported texts")
    assert second.startswith("smollm2 (Table 5): 9 reported texts")


def test_a_run_without_facts_has_no_sentence():
    exhibit = Exhibit("table12", "Latency", "", "", facts={"examples": {}})
    assert run_sentences.sentences([exhibit]) == []
