"""The Evaluation Harness with our models, and the error message if it is missing."""

import json
import pathlib
import re
import sys
import types

import pytest

from bpd_jax import lm_eval
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.asset_files import ASSET_FOLDERS
from bpd_jax.evaluation.lm_eval_model import HarnessModel
from tests.commands import Script, assert_refused, python
from tests.json_lines import write_json_lines

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "lm_eval.md").read_text()


@pytest.mark.parametrize("missing", ["lm_eval", "lm_eval.api.model"])
def test_a_missing_harness_is_reported(tmp_path, missing):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "from bpd_jax.lm_eval import main\n"
        "main()\n"
    )
    result = Script(program, folder=tmp_path, environment={}).wait(timeout=240)
    assert_refused(result, "the Evaluation Harness cannot be imported")
    assert "pip install 'lm_eval" in result.stderr


def test_a_dataset_that_is_a_program_is_refused(monkeypatch):
    harness = types.ModuleType("lm_eval.__main__")
    monkeypatch.setitem(sys.modules, "lm_eval", types.ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", harness)
    for name in ("register", "_mesh", "_share_work", "keep_compiled"):
        monkeypatch.setattr(lm_eval, name, lambda *_: None)

    def fail(message):
        raise RuntimeError(message)

    said = "Dataset scripts are no longer supported, but found old.py"
    harness.cli_evaluate = lambda: fail(said)
    with pytest.raises(UserError, match=r"is a program, .*old\.py.*consists of files"):
        lm_eval._run()
    harness.cli_evaluate = lambda: fail("out of luck")
    with pytest.raises(RuntimeError, match="out of luck"):
        lm_eval._run()


def test_the_page_names_every_argument():
    for name in (*HarnessModel.__init__.__kwdefaults__, *ASSET_FOLDERS):
        assert f"`{name}`" in PAGE


@pytest.fixture
def tasks(tmp_path):
    """A folder with the task of docs/lm_eval.md and one of every other kind."""
    pytest.importorskip("lm_eval")
    [task] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    data = [
        {"question": f"{n} times 2 is", "answer": f"{2 * n}. #### {2 * n}"}
        for n in range(3, 8)
    ]
    write_json_lines(tmp_path / "gsm8k.jsonl", data)
    short = {"max_gen_toks: 96": "max_gen_toks: 12", "{{question}}\\nAnswer:": "3"}
    for old, new in short.items():
        assert old in task
        task = task.replace(old, new)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "gsm8k_20.yaml").write_text(task)
    facts = [
        {"fact": f"{n} times 3 is", "answers": [f" {3 * n}.", f" {n}#"], "right": 0}
        for n in range(1, 5)
    ]
    write_json_lines(tmp_path / "facts.jsonl", facts)
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "facts.jsonl"}},
        "test_split": "test",
        "doc_to_text": "{{fact}}",
        "doc_to_target": "right",
    }
    choice = {"doc_to_choice": "answers", "target_delimiter": ""}
    rolling = {"doc_to_text": "", "doc_to_target": "{{fact}}"}
    for name, kind, overrides in (
        ("choice", "multiple_choice", choice),
        ("rolling", "loglikelihood_rolling", rolling),
    ):
        # JSON is YAML.
        fields = {"task": name, "output_type": kind, **common, **overrides}
        (tmp_path / "tasks" / f"{name}.yaml").write_text(json.dumps(fields))
    return tmp_path


def test_the_harness_evaluates_every_kind_of_task_on_a_mesh(tasks, trained):
    """`evaluation/lm_eval_model_test` and `decoding/meshes_test` compare results."""
    output = tasks / "results"
    model = f"model={trained / 'run'},method=zero_gram:4,batch_size=3"
    sizes = {"data": 2, "fsdp": 2, "model": 2}
    result = python(
        *("-m", "bpd_jax.lm_eval", "--model", "bpd_jax", "--model_args", model),
        *("--include_path", "tasks", "--tasks", "gsm8k_20,choice,rolling"),
        *("--output_path", str(output), "--log_samples"),
        *(f"--gin.MeshConfig.{axis}={size}" for axis, size in sizes.items()),
        folder=tasks,
        HF_HOME=str(tasks / "cache"),
    )
    assert result.returncode == 0, result.stderr
    assert "zero_gram:4: " in result.stderr  # the tokens per serial call
    [results] = output.rglob("results*.json")
    results = json.loads(results.read_text())["results"]
    samples = [len([*path.open()]) for path in sorted(output.rglob("samples*.jsonl"))]
    assert samples == [4, 5, 4]
    assert 0 <= results["choice"]["acc,none"] <= 1
    assert results["rolling"]["word_perplexity,none"] > 1
