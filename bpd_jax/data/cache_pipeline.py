"""Tokenizes a task into seqio's cache with Apache Beam; `seqio_cache` reads it.

    shards of the source     files, each read and tokenized by one worker
      -> Reshuffle           shuffles the examples
      -> TFRecord files      and, for seqio, their features and sizes as JSON

The layout is that of seqio's own cache_tasks_main.
"""

import contextlib
import functools
import json
import pathlib
import re
from collections.abc import Iterator, Sequence

from bpd_jax.base.errors import UserError
from bpd_jax.data import beam_pipelines, seqio_cache, seqio_tasks
from bpd_jax.data.example_readers import existing_splits
from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.quiet_tensorflow import seqio, tf
from bpd_jax.storage import folders

try:
    import apache_beam as beam
    from apache_beam.io import filebasedsink
    from seqio import beam_utils
except ModuleNotFoundError as error:
    raise UserError(
        f"caching a task needs apache-beam, and {error.name} is not installed: install "
        "it, or make the rows without a cache."
    ) from error

# Files of a split, unless its source has more.
_LEAST_FILES = 16
# This file is written first and marks the folder as created by this module.
_BEGUN, _BEGUN_TEXT = "BEGUN", "by bpd_jax.prepare"
# Names in the folder, also while the pipeline runs.
_NAMES = re.compile(r"BEGUN|COMPLETED|.*\.json|.*\.tfrecord-.*|beam-temp-.*")
_KIND = folders.FolderKind("a cache of a task", _BEGUN, text=_BEGUN_TEXT)


def cache_task(
    task: ExampleTask,
    cache_dir: str,
    options: Sequence[str] = (),
) -> str:
    """Tokenizes all splits of a task with a Beam pipeline.

    Returns the folder of the task's cache; an existing matching one is left unchanged.
    `BEGUN` is written first and `COMPLETED` last. A local folder is created atomically;
    on other file systems a folder without `COMPLETED` is overwritten.

    Args:
      task: source and vocabulary, which must not be `bpe:N`: give the path of the
        trained tokenizer.
      cache_dir: folder for the caches of all tasks, on any file system that TensorFlow
        supports, such as gs://bucket/cache.
      options: command-line options of Beam.
    """
    folder = seqio_cache.cache_folder(task, cache_dir)
    if seqio_cache.is_complete(folder):
        seqio_cache.check_fits(task, folder)
        return folder
    if task.trained_size is not None:
        raise UserError(
            f"vocabulary {task.vocabulary!r} would be trained by every worker: give "
            "the path of its tokenizer.json."
        )
    description = json.dumps(seqio_cache.describe(task), indent=2) + "\n"
    with (
        beam_pipelines.worker_errors(folder, tf.errors.OpError),
        _output(folder) as output,
    ):
        pipeline = beam_pipelines.make_pipeline(options)
        with pipeline:
            for split in existing_splits(task):
                _add_split(pipeline, task, split, output)
        contents = {seqio_cache.DESCRIPTION: description, seqio_cache.COMPLETED: ""}
        for name, text in contents.items():
            with tf.io.gfile.GFile(f"{output}/{name}", "w") as file:
                file.write(text)
    return folder


@contextlib.contextmanager
def _output(folder: str) -> Iterator[str]:
    """Yields the folder to write to, which is renamed to `folder` on success."""
    if "://" in folder:
        if tf.io.gfile.exists(folder):
            names = [name.rstrip("/") for name in tf.io.gfile.listdir(folder)]
            foreign = [name for name in names if not _NAMES.fullmatch(name)]
            marker, begun = f"{folder}/{_BEGUN}", b""
            if tf.io.gfile.exists(marker):
                with tf.io.gfile.GFile(marker, "rb") as file:
                    begun = file.read(len(_BEGUN_TEXT))
            if foreign or (names and begun != _BEGUN_TEXT.encode()):
                raise _not_a_cache(folder)
            tf.io.gfile.rmtree(folder)  # Left by an interrupted pipeline.
        tf.io.gfile.makedirs(folder)
        _begin(folder)
        yield folder
        return
    if pathlib.Path(folder).exists():
        raise _not_a_cache(folder)
    with folders.replacing_folder(folder, _KIND) as temporary:
        _begin(str(temporary))
        yield str(temporary)


def _begin(folder: str) -> None:
    with tf.io.gfile.GFile(f"{folder}/{_BEGUN}", "w") as file:
        file.write(f"{_BEGUN_TEXT}\n")


def _not_a_cache(folder: str) -> UserError:
    return UserError(f"{folder} exists and is not a cache: name another folder.")


class _TFRecordSink(filebasedsink.FileBasedSink):
    """Writes TFRecord files with TensorFlow; Beam's own sink needs another package."""

    def open(self, temp_path: str) -> tf.io.TFRecordWriter:
        """Opens a file."""
        return tf.io.TFRecordWriter(temp_path)

    def write_encoded_record(
        self, file_handle: tf.io.TFRecordWriter, value: bytes
    ) -> None:
        """Writes a record."""
        file_handle.write(value)

    def close(self, file_handle: tf.io.TFRecordWriter) -> None:
        """Closes the file."""
        file_handle.close()


def _add_split(
    pipeline: beam.Pipeline,
    task: ExampleTask,
    split: str,
    output: str,
) -> None:
    """Adds the transforms that tokenize and write one split, with seqio's metadata."""
    seqio_task = seqio_tasks.register(task)
    tokenized = beam_utils.PreprocessTask(
        seqio_task,
        split,
        # A worker process knows only the tasks that its modules register.
        setup_fn=functools.partial(seqio_tasks.register, task),
    )
    num_shards = max(len(tokenized.shards), _LEAST_FILES)
    examples = (
        pipeline
        | f"{split}_tokenize" >> tokenized
        | f"{split}_shuffle" >> beam.Reshuffle()
    )
    sink = _TFRecordSink(
        seqio.get_cached_tfrecord_prefix(output, split),
        beam.coders.BytesCoder(),
        num_shards=num_shards,
    )
    _ = (
        examples
        | f"{split}_encode" >> beam.Map(_serialized)
        | f"{split}_write" >> beam.io.Write(sink)
    )
    _ = (
        examples
        | f"{split}_info" >> beam_utils.GetInfo(num_shards)
        | f"{split}_write_info"
        >> beam_utils.WriteJson(seqio.get_cached_info_path(output, split))
    )
    _ = (
        examples
        | f"{split}_stats" >> beam_utils.GetStats(seqio_task.output_features)
        | f"{split}_write_stats"
        >> beam_utils.WriteJson(seqio.get_cached_stats_path(output, split))
    )


def _serialized(example: dict[str, tf.Tensor]) -> bytes:
    return seqio.dict_to_tfexample(example).SerializeToString()
