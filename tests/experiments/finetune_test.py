"""What `experiments.finetune.run` says of its own figures."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent

# In a process of its own, whose flags are no other command's.
_SCRIPT = """
import json, pathlib, sys
import numpy as np
from absl import flags
from bpd_jax.cli import rewrite_gin_arguments
from bpd_jax.data.rows import PackedRows
from experiments.finetune import run
flags.FLAGS(rewrite_gin_arguments(["run", *sys.argv[1:]]))
tokens = np.arange(50)[:, None].repeat(4, axis=1)
rows = PackedRows(
    pathlib.Path(), tokens, tokens > 0, tokens % 2 == 0, 4, 200, 50, "validation",
    "gpt3", 50257, 50256, {}
)
left = run._rows_from(rows, 40)
print(json.dumps([run._given(), [
    len(left), *(x[:, 0].tolist() for x in (left.batch(slice(0, 3))[::3]))
]]))
"""


def test_figures_name_no_place_and_are_of_rows_that_chose_nothing(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _SCRIPT,
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
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    given, left = json.loads(done.stdout.splitlines()[-1])
    assert given == [
        "--tasks=squad,xsum",
        "--rows=7",
        "--gin.STEPS=3",
        "--gin.ExampleTask.vocabulary='PATH'",
    ]
    assert left == [10, [40, 41, 42], [True, False, True]]
