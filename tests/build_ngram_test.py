"""`bpd_jax.build_ngram` as a command."""

import pathlib

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
