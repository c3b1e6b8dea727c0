"""The figures and the command that `experiments.finetune.run` reports."""

import json

from tests.commands import Script

# In a process of its own, because commands share absl's global flags.
_SCRIPT = """
import json, pathlib, sys, types
import numpy as np
from absl import flags
from bpd_jax.base.cli import rewrite_gin_arguments
from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.rows import PackedRows
from bpd_jax.base.errors import UserError
from experiments.finetune import run
flags.FLAGS(rewrite_gin_arguments(["run", *sys.argv[1:]]))
tokens = np.arange(50)[:, None].repeat(4, axis=1)
rows = PackedRows(
    pathlib.Path(), tokens, tokens > 0, tokens % 2 == 0, 4, 200, 50, "validation",
    "gpt3", 50257, 50256, {}
)
config = types.SimpleNamespace(batch_size=8, evaluate_batches=5)
left = run._rows_from(rows, run._rows_that_chose(config, rows))
config.evaluate_batches = None
none_left = run._rows_from(rows, run._rows_that_chose(config, rows))
flags.FLAGS.gin_file = ["a.gin"]
try:
    run.main()
except UserError as refused:
    error = str(refused)
task = ExampleTask("squad", files=sys.argv[-1])
answers = run._answers(task, ["validation.jsonl:1", "validation.jsonl:3"])
words = dict(enumerate(["", "a", " red", " cat"]))
tokenizer = types.SimpleNamespace(decode=lambda ids: "".join(map(words.get, ids)))
loaded = types.SimpleNamespace(tokenizer=tokenizer, end_tokens=(0,))
texts = [types.SimpleNamespace(output_ids=ids) for ids in ([1, 3, 0], [2, 3, 0])]
scores = run._quality("squad", loaded, texts, list(answers.values()))
print(json.dumps([run._arguments(), [
    len(left), *(x[:, 0].tolist() for x in (left.batch(slice(0, 3))[::3])),
    len(none_left)
], answers, scores, run._quality("c4", loaded, texts, []), error]))
"""


def test_reported_figures_omit_paths_and_use_rows_not_used_for_selection(tmp_path):
    """`a cat` matches `the cat`, and `red cat` shares a word with `red dog`.

    The other answers belong to another example or match worse.
    """
    answers = [["the cat", "dogs"], ["other"], ["bird", "red dog"]]
    (tmp_path / "validation.jsonl").write_text(
        "".join(json.dumps({"answers": {"text": texts}}) + "\n" for texts in answers)
    )
    program = tmp_path / "program.py"
    program.write_text(_SCRIPT)
    result = Script(
        program,
        "--data",
        str(tmp_path),
        f"--output={tmp_path}/a.json",
        "-runs",
        f"{tmp_path}/runs",
        "--rows",
        "7",
        "--tasks=squad,xsum",
        "--gin.STEPS=3",
        f"--gin.ExampleTask.vocabulary='{tmp_path}/v.json'",
        f"{tmp_path}/{{split}}.jsonl",
        folder=tmp_path,
        environment={},
    ).wait(timeout=240)
    assert result.returncode == 0, result.stderr
    command, remaining, answers_by_id, scores, no_scores, error = json.loads(
        result.stdout.splitlines()[-1]
    )
    assert command == [
        "--tasks=squad,xsum",
        "--rows=7",
        "--gin.STEPS=3",
        "--gin.ExampleTask.vocabulary='PATH'",
    ]
    # Without evaluate_batches all rows are used for selection.
    assert remaining == [10, [40, 41, 42], [True, False, True], 0]
    assert answers_by_id == {
        "validation.jsonl:1": answers[0],
        "validation.jsonl:3": answers[2],
    }
    assert scores["scores"] == {"exact_match": 50, "f1": 75}
    assert scores["score_intervals"] == {"exact_match": [0, 100], "f1": [50, 100]}
    assert no_scores == {}
    assert error.startswith("--gin_file is not used here")
