"""Small corpora for the tests of this folder."""

import importlib.util
import pathlib

import pytest

from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.text_task import TextTask
from tests.json_lines import write_json_lines

# Hosts that only train and decode lack seqio; they still run the other tests.
if importlib.util.find_spec("seqio") is None:
    collect_ignore = [
        f"{name}_test.py" for name in ("seqio_cache", "seqio_tasks", "seqio_vocabulary")
    ]

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def document(number: int) -> str:
    """A text that begins with '!', which is token 0 of GPT-3's vocabulary."""
    words = [WORDS[(number * k) % 10] for k in range(1, 4 + number % 17)]
    return f"!{number}: {' '.join(words)}\r\nnaïve <|endoftext|> 😀\0\n"


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of 40 text files, some of them in a subfolder."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "below").mkdir()
    for number in range(40):
        parent = folder / "below" if number % 3 else folder
        (parent / f"{number:02d}.txt").write_bytes(document(number).encode())
    return folder


@pytest.fixture
def without_seqio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a host without seqio."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "seqio" else find_spec(name, *rest),
    )


@pytest.fixture(scope="session")
def text_task(corpus_folder: pathlib.Path) -> TextTask:
    """The corpus with a quarter held out and a vocabulary of 280 tokens."""
    return TextTask(
        corpus="text_files",
        text_files=str(corpus_folder / "**" / "*.txt"),
        vocabulary="bpe:280",
        validation_fraction=0.25,
    )


def squad_record(number: int) -> dict[str, object]:
    """A question on one of a few contexts, in the form of TensorFlow Datasets."""
    words = [WORDS[(number * k) % 10] for k in range(1, 4 + number % 5)]
    return {
        "id": str(number),
        "title": "numbers",
        "context": f"naïve <|endoftext|> text {number // 3}: {document(number // 3)}",
        "question": f"!{number} 😀?",
        "answers": {"text": [" ".join(words), "another"], "answer_start": [0, 1]},
    }


@pytest.fixture(scope="session")
def squad_task(tmp_path_factory: pytest.TempPathFactory) -> ExampleTask:
    """60 training questions in three files, and 12 validation questions."""
    folder = tmp_path_factory.mktemp("squad")
    for part in range(3):
        records = [squad_record(number) for number in range(20 * part, 20 * part + 20)]
        write_json_lines(folder / f"train-{part}.jsonl.gz", records)
    records = [squad_record(number) for number in range(60, 72)]
    write_json_lines(folder / "validation-0.jsonl", records)
    return ExampleTask("squad", files=str(folder / "{split}-*.jsonl*"))
