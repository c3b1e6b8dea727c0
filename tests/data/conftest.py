"""A small corpus that every test of this folder may read."""

import importlib.util
import pathlib

import pytest

from bpd_jax.data.spec import TextTask

# Hosts that only train and decode lack seqio; they still run the other tests.
if importlib.util.find_spec("seqio") is None:
    collect_ignore = [
        f"{name}_test.py" for name in ("converter", "prepare", "tasks", "vocabularies")
    ]

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def document(number: int) -> str:
    """A text that begins with '!', which is token 0 of GPT-3's vocabulary."""
    words = [WORDS[(number * k) % 10] for k in range(1, 4 + number % 17)]
    return f"!{number}: {' '.join(words)}\r\nnaïve <|endoftext|> 😀\0\n"


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of 40 text files, some of them in a folder below."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "below").mkdir()
    for number in range(40):
        place = folder / "below" if number % 3 else folder
        (place / f"{number:02d}.txt").write_bytes(document(number).encode())
    return folder


@pytest.fixture(scope="session")
def text_task(corpus_folder: pathlib.Path) -> TextTask:
    """The corpus with a quarter held out and a vocabulary of 280 tokens."""
    return TextTask(
        corpus="text_files",
        text_files=str(corpus_folder / "**" / "*.txt"),
        vocabulary="bpe:280",
        validation_fraction=0.25,
    )
