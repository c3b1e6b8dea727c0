"""No command replaces or writes into a folder that it did not create."""

import pytest

from tests.commands import start

COMMANDS = {
    "evaluate": ["--model=nowhere"],
    "export_params": ["--model=nowhere"],
    "export": ["--model=nowhere"],
    "import_heads": ["--model=nowhere", "--medusa=nowhere"],
    "distill": ["--model=nowhere", "--made_up_prompts=1"],
    "build_ngram": ["--tokens={folder}/ids.txt"],
    "count_ngrams": ["--tokens={folder}/ids.txt"],
    "prepare": ["--task=text_files", "--files={folder}/ids.txt", "--length=8"],
}
# Outputs of other commands, and folders that only resemble an output.
FOLDERS = {
    "run": ["model.json", "checkpoints", "ngram", "config.gin"],
    "model": ["config.json", "model.safetensors", "tokenizer.json"],
    "report": ["report.json", "report.html", "notes.txt"],
    "rows": ["rows.json", "tokens.npy", "notes.txt"],
    "ngram": ["ngram_model.json", "ngram_counts.json", "thesis.txt"],
    "heads": ["heads.json", "heads.safetensors"],
    "texts": ["distill.json", "slim.json"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_folders_of_other_commands_are_refused(tmp_path, command):
    (tmp_path / "ids.txt").write_text("1 2 3\n4 5 6\n")
    for folder, names in FOLDERS.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("years of work")
    before = {path: path.read_text() for path in tmp_path.glob("*/*")}
    flags = [flag.format(folder=tmp_path) for flag in COMMANDS[command]]
    outputs = [f"--output={tmp_path / folder}" for folder in FOLDERS]
    results = start(f"bpd_jax.{command}", *([*flags, output] for output in outputs))
    for folder, (status, _, error) in zip(FOLDERS, results, strict=True):
        assert status == 1, (folder, error)
        assert f"{folder} is not written to" in error, (folder, error)
    assert {path: path.read_text() for path in tmp_path.glob("*/*")} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*FOLDERS, "ids.txt"])
