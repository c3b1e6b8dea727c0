import dataclasses
import importlib.resources
import itertools
import json
import sys

import pytest
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from bpd_jax.base.errors import UserError
from bpd_jax.data import seqio_tasks, tfds_source
from bpd_jax.data.example_readers import read_examples
from bpd_jax.data.example_task import DATASETS, ExampleTask
from bpd_jax.data.tokenizer import gpt3_tokenizer
from bpd_jax.studies.tasks import has_train, read_sources
from tests.data.conftest import squad_record
from tests.json_lines import write_json_lines

END, SEPARATOR = 50256, 198


@pytest.fixture(autouse=True)
def forget_builders():
    """Clears seqio's cache of opened data sets, which may be mocked."""
    yield
    seqio.utils.LazyTfdsLoader._MEMOIZED_BUILDERS.clear()


def read(task, split="train", **options):
    """The examples of a seqio task as lists."""
    dataset = task.get_dataset(split=split, shuffle=False, **options)
    return [
        {name: tokens.tolist() for name, tokens in example.items()}
        for example in seqio_tasks.examples(dataset, task.source)
    ]


def assert_same(left, right):
    """Compares examples in any order."""
    assert sorted(map(str, left)) == sorted(map(str, right))


def mock_records(records):
    """Mocks TensorFlow Datasets with these questions in every split."""
    text, texts = tf.TensorSpec([], tf.string), tf.TensorSpec([None], tf.string)
    signature = dict.fromkeys(("id", "question", "context"), text)

    records = [
        {name: record[name] for name in signature}
        | {"answers": {"text": record["answers"]["text"]}}
        for record in records
    ]

    def as_dataset(self, *args, **kwargs):
        return tf.data.Dataset.from_generator(
            lambda: records, output_signature={**signature, "answers": {"text": texts}}
        )

    return tfds.testing.mock_data(as_dataset_fn=as_dataset)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("c4", "squad")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in DATASETS
    ],
)
def test_every_data_set_of_tensorflow_datasets_is_read(name):
    """The data set's features are filled with random values."""
    dataset = DATASETS[name]
    with tfds.testing.mock_data(num_examples=4):
        examples = read(seqio.TaskRegistry.get(f"{name}.gpt3"), "validation")
        texts = list(read_examples(ExampleTask(name), "validation"))
    assert 0 < len(examples) == len(texts) <= 4
    tokenizer = gpt3_tokenizer()
    for example, text in zip(examples, texts, strict=True):
        targets = tokenizer.encode(text.targets)
        if dataset.prompt is None:
            assert example == {"targets": [END, *targets, END]}
        else:
            literal = dataset.prompt.partition("{")[0]
            assert text.inputs.startswith(literal)
            inputs = [END, *tokenizer.encode(text.inputs), SEPARATOR]
            assert example == {"inputs": inputs, "targets": [*targets, END]}


def test_both_sources_have_the_same_features(tmp_path):
    records = [squad_record(number) for number in range(12)]
    # Both sources omit the two questions without an answer.
    records += [{**records[0], "answers": {"text": text}} for text in ([], [""])]
    write_json_lines(tmp_path / "train.jsonl", records)
    task = ExampleTask("squad", files=f"{tmp_path}/{{split}}.jsonl")
    texts = [text[1:] for text in read_examples(task, "train")]
    from_files = read(seqio_tasks.get_task(task))
    with mock_records(records):
        assert read(seqio.TaskRegistry.get("squad.gpt3")) == from_files
        same = read_examples(ExampleTask("squad"), "train")
        assert [text[1:] for text in same] == texts
    tokenizer = gpt3_tokenizer()
    assert from_files == [
        {
            "inputs": [END, *tokenizer.encode(inputs), SEPARATOR],
            "targets": [*tokenizer.encode(targets), END],
        }
        for inputs, targets in texts
    ]
    assert len(texts) == 12


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_shards_partition_the_examples(squad_task, count):
    """With three files, two readers divide files, and four divide examples."""
    task = seqio_tasks.get_task(squad_task)
    parts = [
        read(task, shard_info=seqio.ShardInfo(index, count)) for index in range(count)
    ]
    assert all(parts)
    assert_same(itertools.chain(*parts), read(task))


def test_max_examples_applies_to_all_shards_together(squad_task):
    task = seqio_tasks.get_task(dataclasses.replace(squad_task, max_examples=25))
    parts = [read(task, shard_info=seqio.ShardInfo(index, 2)) for index in range(2)]
    assert parts[0][0] == read(task)[0]
    assert [len(part) for part in parts] == [13, 12]


def test_validation_may_be_the_end_of_train():
    for changes, expected in (
        ({"validation_fraction": 0.05}, ["train[:95%]", "train[95%:]"]),
        ({"max_examples": 7}, ["train[:7]", "train[-7:]"]),
    ):
        task = ExampleTask("squad", validation_from="train", **changes)
        source = tfds_source.TfdsSource(task)
        splits = [source.tfds_dataset._map_split(s) for s in ("train", "validation")]
        assert splits == expected


def test_user_errors_pass_through_tensorflow(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"document": "x"}\n')
    task = seqio_tasks.get_task(ExampleTask("xsum", files=str(tmp_path / "a.jsonl")))
    with pytest.raises(UserError, match=r"a\.jsonl, line 1 has no .*'summary'"):
        read(task)


def test_data_set_on_disk_is_read(tmp_path, monkeypatch):
    """Prepares a data set with TensorFlow Datasets and compares it with JSON Lines."""
    monkeypatch.setattr(tfds.core.utils.gcs_utils, "exists", lambda path: False)
    # The preparation imports the backport of this module by name.
    monkeypatch.setitem(sys.modules, "importlib_resources", importlib.resources)
    lines = [
        {"document": f"document {number}", "summary": f"{number} in short"}
        for number in range(30)
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "validation.jsonl").write_text(text)

    with tfds.core.registered.skip_registration():

        class Xsum(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.1.0")

            def _info(self):
                texts = dict.fromkeys(("document", "summary"), tfds.features.Text())
                return self.dataset_info_from_configs(
                    features=tfds.features.FeaturesDict(texts)
                )

            def _split_generators(self, manager):
                return {"validation": enumerate(lines)}

            def _generate_examples(self):
                raise NotImplementedError

    Xsum(data_dir=str(tmp_path)).download_and_prepare(
        download_config=tfds.download.DownloadConfig(num_shards=4)
    )
    work_place = ExampleTask("xsum", data_dir=str(tmp_path))
    task = seqio_tasks.get_task(work_place)
    examples = read(task, "validation")
    from_files = ExampleTask("xsum", files=str(tmp_path / "{split}.jsonl"))
    assert_same(examples, read(seqio_tasks.get_task(from_files), "validation"))
    assert len(task.source.list_shards("validation")) == 4
    assert task.source.num_input_examples("validation") == 30
    for count in (2, 5):
        parts = [
            read(task, "validation", shard_info=seqio.ShardInfo(index, count))
            for index in range(count)
        ]
        assert all(parts)
        assert_same(itertools.chain(*parts), examples)
    assert_same(tfds_source.tfds_records(work_place, "validation"), lines)
    # Studies read the records of both sources; JSON Lines take precedence.
    sources = [(s.document, *s.references) for s in read_sources(tmp_path, "xsum")]
    assert_same(sources, [tuple(line.values()) for line in lines])
    (tmp_path / "xsum" / "test.jsonl").write_text(json.dumps(lines[0]))
    assert len([*read_sources(tmp_path, "xsum")]) == 1
    limited = seqio_tasks.get_task(dataclasses.replace(work_place, max_examples=5))
    assert limited.source.num_input_examples("validation") == 5
    assert len(read(limited, "validation")) == 5
    assert len(list(read_examples(work_place, "validation"))) == 30
    with pytest.raises(UserError, match=r"not prepared the test split of xsum:1"):
        read(task, "test")
    assert not has_train(tmp_path, "xsum")


def test_nothing_is_downloaded(tmp_path, monkeypatch):
    # No public copy is looked up either.
    monkeypatch.setattr(tfds.core.utils.gcs_utils, "exists", lambda path: False)
    task = ExampleTask("squad", data_dir=str(tmp_path))
    message = rf"split of squad/v1.1:3.0.0 in {tmp_path}.*tfds build squad/v1.1.*files"
    for attempt in (
        lambda: read(seqio_tasks.get_task(task)),
        lambda: list(read_examples(task, "validation")),
        lambda: read(seqio_tasks.get_task(task), shard_info=seqio.ShardInfo(0, 2)),
    ):
        with pytest.raises(UserError, match=message):
            attempt()
    assert not list(tmp_path.iterdir())


def test_registered_task_frames_and_splits_documents():
    # seqio replaces the task's documents by this text.
    raw = {"train": {"text": "Hello, world!"}}
    with seqio.test_utils.DataInjector("c4.gpt3", raw):
        task = seqio.get_mixture_or_task("c4.gpt3")
        dataset = task.get_dataset({"targets": 4}, split="train", shuffle=False)
        seqio.test_utils.assert_dataset(
            dataset, [{"targets": [END, 15496, 11, 995]}, {"targets": [0, END]}]
        )


def test_token_documents_reads_other_registered_tasks():
    name, texts = "tasks_test.own", ["!", "! two words", "naïve"]
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            lambda split, shuffle_files: tf.data.Dataset.from_tensor_slices(
                {"targets": texts}
            ),
            splits=["train"],
        ),
        output_features={"targets": seqio.Feature(seqio.ByteVocabulary())},
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    )
    try:
        token_ids = list(seqio_tasks.token_documents(name, "train", "gpt3"))
        expected = gpt3_tokenizer().encode_batch(texts)
        assert [ids.tolist() for ids in token_ids] == expected
        assert expected[0] == [0]  # '!', kept although its id is 0.
    finally:
        seqio.TaskRegistry.remove(name)


def test_error_of_an_unknown_task_lists_the_tasks():
    with pytest.raises(UserError, match=r"'books'.*stdlib, text_files, .*squad\.gpt3"):
        next(seqio_tasks.token_documents("books", "train", "gpt3"))
