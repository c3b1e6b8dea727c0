"""A conversation with a model through a pipe."""

import json
import shutil

import pytest

from tests.commands import ROOT, Script

TALK = """
import io, runpy, sys
sys.stdin = io.StringIO(open(sys.argv.pop()).read())
runpy.run_module("bpd_jax.chat", run_name="__main__", alter_sys=True)
"""
TEMPLATE = """{% for m in messages %}{{ m["role"] }}: {{ m["content"] }}
{% endfor %}assistant:"""


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    """Runs the command with these lines as its input."""
    folder = tmp_path_factory.mktemp("talk")
    shutil.copytree(ROOT / "tests/formats/golden/llama", folder / "model")
    settings = folder / "model" / "tokenizer_config.json"
    template = {"chat_template": TEMPLATE}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **template}))
    (folder / "talk.py").write_text(TALK)

    def run(*lines):
        (folder / "talk.txt").write_text("".join(f"{line}\n" for line in lines))
        arguments = [f"--model={folder / 'model'}", "--max_new_tokens=8"]
        arguments.append(str(folder / "talk.txt"))
        script = Script(folder / "talk.py", *arguments, folder=folder, environment={})
        return script.wait(timeout=300), folder

    return run


def test_answers_are_printed_with_their_speed_and_kept(talk):
    folder = talk()[1]
    target = folder / "said.json"
    result, _ = talk(
        "3 + 4",
        "",
        "/plain",
        "two",
        f"/save {target}",
        "/reset",
        "3 + 4",
        "/quit",
        "three",
    )
    assert result.returncode == 0, result.stderr
    said = json.loads(target.read_text())
    assert [message["role"] for message in said] == ["user", "assistant"] * 2
    assert [message["content"] for message in said[::2]] == ["3 + 4", "two"]
    # Plain decoding and drafts have the same text.
    answers = [said[1]["content"], said[3]["content"], said[1]["content"]]
    printed = "".join(c for c in result.stdout if c not in "[]\n")
    assert printed == "".join(answers).replace("\n", "")
    speeds = [line for line in result.stderr.splitlines() if "tokens per call" in line]
    assert len(speeds) == 3
    assert speeds[1].startswith("greedy: ")
    assert "1.00 tokens per call" in speeds[1]


def test_what_cannot_be_done_is_one_sentence_and_the_talk_goes_on(talk):
    target = talk()[1] / "short.json"
    result, _ = talk(
        "/plane", "/method nonsense", "/save", "x " * 999, "hi", f"/save {target}"
    )
    errors = [line for line in result.stderr.splitlines() if "error: " in line]
    assert result.returncode == 1
    assert [error.split()[1:3] for error in errors[:1]] == [["there", "is"]]
    for error, words in zip(
        errors,
        ("/help lists all", "unknown method", "name a file", "the model holds"),
        strict=True,
    ):
        assert words in error
    assert len(json.loads(target.read_text())) == 2
