import dataclasses
import json
import shutil

import pytest

pytest.importorskip("apache_beam")

from bpd_jax.base.errors import UserError
from bpd_jax.data import cache_pipeline, seqio_cache, seqio_tasks
from bpd_jax.data.cache_pipeline import cache_task
from bpd_jax.data.quiet_tensorflow import tf
from bpd_jax.data.row_preparation import prepare_rows
from bpd_jax.data.row_sources import Shard


def read(task, split, **options):
    dataset = seqio_tasks.get_task(task).get_dataset(
        split=split, shuffle=False, **options
    )
    return sorted(
        str({name: example[name].tolist() for name in sorted(example)})
        for example in dataset.as_numpy_iterator()
    )


@pytest.fixture(scope="module")
def cached(squad_task, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bpd_jax.data.cache_pipeline._LEAST_FILES", 2)
        cache_task(squad_task, folder, ["--runner=DirectRunner"])
    return folder


def test_cached_examples_equal_uncached_examples(squad_task, cached):
    seqio_cache.use_cache(squad_task, cached)
    for split, count in {"train": 60, "validation": 12}.items():
        examples = read(squad_task, split, use_cached=True)
        assert examples == read(squad_task, split)
        assert len(examples) == count


def test_rows_are_made_from_the_cache(squad_task, cached, tmp_path, monkeypatch):
    uncached = prepare_rows(squad_task, "train", 64, tmp_path / "whole")
    monkeypatch.setattr(
        "bpd_jax.data.seqio_tasks.read_records",
        lambda *rest: pytest.fail("read"),
    )
    rows = prepare_rows(squad_task, "train", 64, tmp_path / "rows", cache_dir=cached)
    assert rows.num_documents == 60
    assert (rows.num_tokens, rows.truncation) == (
        uncached.num_tokens,
        uncached.truncation,
    )
    parts = [
        prepare_rows(
            squad_task, "train", 64, tmp_path / "parts", Shard(index, 2), cached
        )
        for index in range(2)
    ]
    assert sum(part.num_documents for part in parts) == 60


@pytest.mark.parametrize(
    "name, data",
    [
        ("task.json", b""),
        ("info.train.json", b"[]"),
        ("train.tfrecord-00000-of-00003", b""),
        ("train.tfrecord-00000-of-00003", b"\xff" * 99),
        ("train.tfrecord-00000-of-00003", None),
    ],
)
def test_a_damaged_cache_is_refused(squad_task, cached, tmp_path, name, data):
    cache = tmp_path / "cache"
    shutil.copytree(cached, cache)
    (path,) = cache.rglob(name)
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    rows = tmp_path / "rows"
    with pytest.raises(UserError, match="cannot read") as caught:
        prepare_rows(squad_task, "train", 64, rows, cache_dir=str(cache))
    assert "\n" not in str(caught.value)
    assert not rows.exists()


def test_cache_is_reused_and_refused_for_other_tasks(squad_task, cached):
    folder = cache_task(squad_task, cached, ["--runner=NoSuchRunner"])
    assert folder.endswith("squad.files.gpt3")
    other_task = dataclasses.replace(squad_task, max_examples=3)
    with pytest.raises(UserError, match="another task: max_examples is None there and"):
        cache_task(other_task, cached)
    with pytest.raises(UserError, match="another task: max_examples is None there and"):
        seqio_cache.use_cache(other_task, cached)


def test_invalid_input_leaves_no_files(squad_task, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "q"}) + "\n")
    task = dataclasses.replace(squad_task, files=str(tmp_path / "{split}.jsonl"))
    cache = tmp_path / "cache"
    with pytest.raises(
        UserError, match=r"train\.jsonl, line 1 has no text in the"
    ) as caught:
        cache_task(task, str(cache), ["--runner=DirectRunner"])
    assert "\n" not in str(caught.value)
    assert not list(cache.iterdir())
    with pytest.raises(UserError, match="would be trained by every worker"):
        cache_task(dataclasses.replace(task, vocabulary="bpe:300"), str(cache))
    with pytest.raises(UserError, match=r"has no complete cache of squad\.files\.gpt3"):
        seqio_cache.use_cache(task, str(cache))
    with pytest.raises(UserError, match="Beam does not accept these options"):
        cache_task(squad_task, str(cache), ["--runner=NoSuchRunner"])


def test_only_interrupted_caches_are_removed_on_other_file_systems(squad_task):
    """Uses TensorFlow's file system in memory instead of a bucket."""
    folder = seqio_cache.cache_folder(squad_task, "ram://bucket")
    other_file, cache_file = f"{folder}/precious", f"{folder}/train.tfrecord-00000"
    tf.io.gfile.makedirs(folder)

    def write(name):
        with tf.io.gfile.GFile(name, "w") as file:
            file.write("x")

    def check_refused():
        with pytest.raises(UserError, match="exists and is not a cache"):
            cache_task(squad_task, "ram://bucket", ["--runner=DirectRunner"])

    write(other_file)
    check_refused()
    tf.io.gfile.rename(other_file, f"{folder}/BEGUN")
    check_refused()
    tf.io.gfile.remove(f"{folder}/BEGUN")
    # An interrupted pipeline, which has not written COMPLETED.
    with cache_pipeline._output(folder):
        write(cache_file)
    write(other_file)
    check_refused()
    tf.io.gfile.remove(other_file)
    with cache_pipeline._output(folder) as output:
        assert output == folder
        assert not tf.io.gfile.exists(cache_file)
