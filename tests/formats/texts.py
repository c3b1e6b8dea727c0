"""Random damage of texts: prompts, corpora, examples, data of studies."""

import functools
import importlib.util
import json
import pathlib
import shutil
import tempfile
import types
from collections.abc import Iterable

import numpy as np

from bpd_jax.data import corpora, example_readers
from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.prompts import read_prompts_file
from bpd_jax.data.row_preparation import prepare_rows
from bpd_jax.data.text_task import TextTask
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.studies import tasks
from tests.formats.registry import add, written

TESTS = pathlib.Path(__file__).parent.parent
HF_FOLDER = TESTS / "pretrained" / "golden" / "llama3"


def _lines(records: Iterable[object]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


_PROMPTS = _lines({"prompt": f"Why is {i} odd? ä"} for i in range(20))

for name in ("prompts.txt", "prompts.jsonl", "prompts.jsonl.gz"):
    add(
        name,
        written(name, _PROMPTS),
        lambda folder, name=name: read_prompts_file(folder / name),
        "*",
    )
add(
    "run_tokenizer",
    lambda folder: shutil.copy(HF_FOLDER / "tokenizer.json", folder),
    Tokenizer.load,
    "*",
)


@functools.cache
def small_tokenizer() -> Tokenizer:
    return Tokenizer.load(HF_FOLDER)


def _read_corpus(folder: pathlib.Path) -> None:
    """Reads and tokenizes documents, as `prepare` and `count_ngrams` do."""
    task = TextTask("text_files", str(folder / "*"), str(HF_FOLDER))
    texts = [document.text for document in corpora.split_documents(task, "all")]
    small_tokenizer().encode_batch(texts)


_DOCUMENTS = [f"Once {i} upon a time\r\nthere was ä\0\n" * (i + 1) for i in range(9)]

add("corpus.txt", written("a.txt", "".join(_DOCUMENTS)), _read_corpus, "*")
for name in ("corpus.jsonl", "corpus.jsonl.gz"):
    text = _lines({"text": document, "id": 3} for document in _DOCUMENTS)
    add(name, written(name, text), _read_corpus, "*")


def _squad(number: int) -> dict[str, object]:
    return {
        "question": f"Who {number}?",
        "context": f"It {number} was a long time ago that ä {{this}} happened. " * 3,
        "answers": {"text": [f"he {number}", "she"], "answer_start": [0, 1]},
    }


_QUESTIONS = _lines(map(_squad, range(9)))
_TURNS = [
    {"category": "writing", "turns": ["Write!", "Shorter!"], "reference": None},
    {"category": "summarization", "turns": ["Summarize: a b c"], "reference": ["a"]},
    {"category": "math", "turns": ["1 + 1?", "And 2?"], "reference": ["2", "3"]},
]


def _example_task(folder: pathlib.Path) -> ExampleTask:
    return ExampleTask(
        "squad", files=str(folder / "*.jsonl*"), vocabulary=str(HF_FOLDER)
    )


def _read_examples(folder: pathlib.Path) -> None:
    texts = []
    for split in ("train", "validation"):
        try:
            examples = example_readers.read_examples(_example_task(folder), split)
            texts += [example.text for example in examples]
        except corpora.EmptySplitError:
            continue
    small_tokenizer().encode_batch(texts)


for name in ("examples.jsonl", "examples.jsonl.gz"):
    add(name, written(name, _QUESTIONS), _read_examples, "*")


def _read_study_data(folder: pathlib.Path) -> None:
    """Draws, truncates and tokenizes the examples of each task, as studies do."""
    model = types.SimpleNamespace(
        tokenizer=small_tokenizer(),
        chat=None,
        encode_prompt=lambda text: np.array(small_tokenizer().encode(text), np.int32),
    )
    model.without_chat = lambda: model
    for task in (path.name for path in folder.iterdir()):
        for name in ("mt_bench", "summarization") if task == "spec_bench" else (task,):
            sources = list(tasks.read_sources(folder, name))
            drawn = tasks.draw_examples(
                sources, model, examples=5, tune=1, longest=40, longest_whole=60
            )
            texts = [*tasks.undrawn_texts(sources, drawn, 3)]
            texts += [turn for example in drawn for turn in example.follow_ups]
            small_tokenizer().encode_batch(texts)
            for example in drawn:  # Records of a study contain them as UTF-8.
                "".join(example.references).encode()


add(
    "study_data.jsonl.gz",
    written("squad/validation.jsonl.gz", _QUESTIONS),
    _read_study_data,
    "squad/*",
)
add(
    "study_data.jsonl",
    written("spec_bench/test.jsonl", _lines(_TURNS * 3)),
    _read_study_data,
    "spec_bench/*",
)


def _write_cache(folder: pathlib.Path) -> None:
    """The files of a task's cache, as the Beam pipeline of `cache_pipeline` writes."""
    from bpd_jax.data import cache_pipeline, seqio_cache, seqio_tasks
    from bpd_jax.data.quiet_tensorflow import seqio, tf

    (folder / "examples.jsonl").write_text(_QUESTIONS)
    task = _example_task(folder)
    cache = seqio_cache.cache_folder(task, str(folder / "cache"))
    pathlib.Path(cache).mkdir(parents=True)
    (pathlib.Path(cache) / seqio_cache.COMPLETED).touch()
    description = json.dumps(seqio_cache.describe(task))
    (pathlib.Path(cache) / seqio_cache.DESCRIPTION).write_text(description)
    prefix = seqio.get_cached_tfrecord_prefix(cache, "train")
    with tf.io.TFRecordWriter(f"{prefix}-00000-of-00001") as writer:
        for example in seqio_tasks.get_task(task).get_dataset(split="train"):
            writer.write(cache_pipeline._serialized(example))
    feature = {"dtype": "int32", "shape": [None]}
    info: dict[str, object] = {
        "features": {"inputs": feature, "targets": feature},
        "num_shards": 1,
    }
    info["seqio_version"] = seqio.__version__
    stats = {"examples": 9, "inputs_tokens": 400, "inputs_max_tokens": 50}
    for path, content in (
        (seqio.get_cached_info_path(cache, "train"), info),
        (seqio.get_cached_stats_path(cache, "train"), stats),
    ):
        pathlib.Path(path).write_text(json.dumps(content))


def _read_cache(folder: pathlib.Path) -> None:
    task = _example_task(folder)
    with tempfile.TemporaryDirectory() as scratch:
        prepare_rows(task, "train", 64, scratch, cache_dir=str(folder / "cache"))


# Hosts that only train and decode have no seqio.
if importlib.util.find_spec("seqio"):
    # COMPLETED, which has no dot, is an empty file.
    add("seqio_cache", _write_cache, _read_cache, "cache/*/*.*")
