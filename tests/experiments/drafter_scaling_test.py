"""The scaling table is generated from the headers of finished runs."""

import json

from tests.commands import call, succeed


def write_run(folder, kind, config, positions, tokens):
    top = {"1": [0.5, 0.25, 0.125], "16": [0.9, 0.8, 0.7]}
    figures = {"tokens_per_call": tokens, "top": top, "chain": [0.5, 0.2, 0.1]}
    facts = {
        **figures,
        "train": figures | {"tokens_per_call": tokens + 1},
        "positions": positions,
        "steps": positions // 50,
        "seconds": 3.0,
        "settings": {"batch_size": 100},
        "versions": {},
    }
    path = folder / f"{kind}_{positions}" / kind
    path.mkdir(parents=True)
    header = json.dumps({"config": config, "facts": facts})
    (path / f"{kind}.json").write_text(header)


def write_decoding(folder, near_ties=1):
    row = {"block_efficiency": 1.5, "ms_per_serial_call": 20.25, "speedup": 1.3}
    row |= {"ms_drafting_alone": 2.0, "nodes_per_call": 8}
    row |= {"texts_that_differ": 1, "of_them_near_ties": 1}
    tree = row | {"of_them_near_ties": near_ties}
    methods = {"greedy": row, "block/greedy": row, "block/tree:8": tree}
    about = {"device": "cpu", "date": "2026-01-01", "prompts": 8, "new_tokens": 48}
    path = folder / "decoding.json"
    path.write_text(json.dumps({**about, "methods": methods}))


def test_finished_runs_make_a_table_and_a_chart(tmp_path):
    drafter = {"block_size": 4, "num_layers": 2, "markov_rank": 0}
    write_run(tmp_path, "drafter", drafter, 4000, 1.9)
    write_run(tmp_path, "drafter", drafter, 1000, 1.5)
    write_run(tmp_path, "heads", {"num_heads": 4}, 1000, 1.25)
    for name in ("unfinished", "results"):
        (tmp_path / name).mkdir()
    write_decoding(tmp_path / "drafter_4000")
    output = tmp_path / "results" / "scaling.json"
    command = ["benchmarks.drafter_scaling", f"--runs={tmp_path}", f"--output={output}"]
    result = succeed(*command)
    rows = json.loads(output.read_text())["runs"]
    drafter = "block drafter of 2 layers"
    arms = [(row["arm"], row["positions"]) for row in rows]
    assert arms == [(drafter, 1000), (drafter, 4000), ("heads", 1000)]
    assert rows[1]["epochs"] == 2
    assert (
        "layers | 4,000 | 1.90 (2.90) | 50 / 25 / 12 % (50 / 25 / 12 %)"
        in result.stdout
    )
    assert output.with_suffix(".svg").read_text().startswith("<svg")
    # Times of decoding are columns of the table.
    assert rows[0]["decoding"] is None
    assert list(rows[1]["decoding"]["searches"]) == ["greedy", "tree:8"]
    title, *lines, _ = result.stdout.splitlines()
    assert "tree:8: tokens per call, ms per call, speed-up" in title
    assert lines[1].endswith("| 1.50, 20.2, 1.30 | 1.50, 20.2, 1.30")
    assert lines[0].endswith("| not measured | not measured")
    write_decoding(tmp_path / "drafter_4000", near_ties=0)
    result = call(*command)
    assert result.returncode
    assert "texts differ from plain decoding by block/tree:8" in result.stderr
