"""The same counts from an Apache Beam pipeline, for text beyond one machine.

    shares of the source                            files, read by many workers
      -> sorted distinct windows, part by part      windows.sorted_parts
      -> GroupByKey                                 the key is the part
      -> one sorted file per part                   windows.merged
    parts, in order -> counts of every order        levels.assemble, on this machine

The parts are ranges of windows, chosen so from a sample of the text that they are about
equal. The last step is one pass over the parts, in the memory of a few of them; the
result lies on disk from the beginning.
"""

import contextlib
import functools
import importlib
import io
import itertools
import os
import pathlib
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bpd_jax import folders
from bpd_jax.buckets import as_path, on_disk
from bpd_jax.errors import UserError
from bpd_jax.ngrams import parallel, storage, trie
from bpd_jax.ngrams.counting import bounded, windows
from bpd_jax.ngrams.counting.counts import NGramCounts, check_min_counts, check_order
from bpd_jax.ngrams.counting.sources import TokenSource

if TYPE_CHECKING:
    import apache_beam

PARTS = 256
_SAMPLE_TOKENS = 1 << 20
_SAMPLE_MEMORY = 1 << 24  # bytes
# What else these take is known to their job server alone.
_WITH_JOB_SERVER = ("PortableRunner", "FlinkRunner", "SparkRunner")
# Beam knows neither the short name of this runner nor, before its module is imported,
# its options.
_DASK = "DaskRunner"
_DASK_MODULE = "apache_beam.runners.dask.dask_runner"

_Packed = tuple[bytes, bytes]  # rows and counts


def count_with_beam(
    source: TokenSource,
    output: str | os.PathLike[str],
    *,
    order: int,
    min_counts: Sequence[int] | None = None,
    memory: int = bounded.DEFAULT_MEMORY,
    options: Sequence[str] = (),
    shared_folder: str | None = None,
) -> NGramCounts:
    """Counts with a pipeline and writes the folder of `bounded.count_to_folder`.

    Args:
      source: text or token files; every worker reads some of the files.
      output: folder to write, on this machine.
      order: the highest order N.
      min_counts: per order, or None for 1 everywhere.
      memory: bytes that a worker takes for the windows it sorts.
      options: of the pipeline, as Beam takes them on a command line, such as
        `--runner=DirectRunner` and `--direct_num_workers=2`.
      shared_folder: where workers write and this machine reads, on any file system that
        Beam knows; by default `OUTPUT.work`. It is removed at the end.

    Raises:
      UserError: the source or an argument is at fault, or Beam is not installed.
    """
    try:
        import apache_beam as beam
    except ModuleNotFoundError as error:
        raise UserError(
            "counting with Beam needs apache-beam, which is not installed."
        ) from error
    from apache_beam.io.filesystems import FileSystems

    check_order(order)
    if min_counts is not None:
        check_min_counts(min_counts, order)
    output = as_path(output)
    folders.check_folder(output, storage.KINDS["counts"])
    folder = shared_folder or f"{on_disk(output)}.work"
    if FileSystems.exists(folder):
        raise UserError(
            f"{folder} is there already: remove it, as a killed pipeline is not "
            "resumed, or give another shared folder."
        )
    packing = windows.Packing(order, source.vocab_size)
    shares = source.shares()
    pipeline = _pipeline(options)
    part_of = _part_of(source, shares, packing)
    with _in_one_sentence(output), contextlib.ExitStack() as stack:
        output.parent.mkdir(parents=True, exist_ok=True)
        FileSystems.mkdirs(folder)
        stack.callback(FileSystems.delete, [folder])
        with _running(pipeline):
            _ = (
                pipeline
                | "shares" >> beam.Create(shares)
                | "spread" >> beam.Reshuffle()
                | "sort" >> beam.FlatMap(sorted_share, packing, part_of, memory)
                | "group" >> beam.GroupByKey()
                | "merge" >> beam.MapTuple(functools.partial(write_part, folder))
            )
        mapped = stack.enter_context(
            tempfile.TemporaryDirectory(
                dir=on_disk(output).parent, prefix=f".{output.name}."
            )
        )
        sorted_windows = read_parts(folder, packing)
        counts = bounded.assemble(sorted_windows, packing, source, min_counts, mapped)
        counts.save(output)
    return NGramCounts.load(output, verify=False)


def _pipeline(texts: Sequence[str]) -> "apache_beam.Pipeline":
    """Returns an empty pipeline with these options.

    Raises:
      UserError: one of them is unknown, or has a value that it cannot have.
    """
    import apache_beam as beam
    from apache_beam.options import pipeline_options

    texts = _for_dask(texts)
    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage):
            options = pipeline_options.PipelineOptions(list(texts))
            known = options.get_all_options()
            given = options.get_all_options(retain_unknown_options=True)
            pipeline = beam.Pipeline(options=options)
    except SystemExit as error:  # argparse has printed its usage and the reason.
        reason = usage.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"Beam does not take these options: {reason}.") from error
    except ValueError as error:
        raise UserError(f"Beam does not take these options: {error}") from error
    unknown = [f"--{name}" for name in given if name not in known]
    runner = options.view_as(pipeline_options.StandardOptions).runner or ""
    if unknown and not runner.endswith(_WITH_JOB_SERVER):
        raise UserError(f"Beam knows no option {' and '.join(unknown)}.")
    return pipeline


def _for_dask(texts: Sequence[str]) -> list[str]:
    """Completes the options of a pipeline on Dask; returns those of others unchanged.

    By default the runner gives 128 files to one task. Here each file is a task, so that
    all workers count and a killed worker loses one file at most.

    Raises:
      UserError: Dask is not installed.
    """
    names = [f"--runner={_DASK}", f"--runner={_DASK_MODULE}.{_DASK}"]
    if not set(names) & set(texts):
        return list(texts)
    try:
        importlib.import_module(_DASK_MODULE)
    except ImportError as error:
        raise UserError(
            f"{_DASK} needs the packages dask and distributed ({error}): install "
            "bpd_jax with the extra dask."
        ) from error
    others = [text for text in texts if text not in names]
    if not any(
        "--dask_npartitions" in x or "--dask_partition_size" in x for x in others
    ):
        others.append("--dask_partition_size=1")
    return [names[1], *others]


@contextlib.contextmanager
def _running(pipeline: "apache_beam.Pipeline") -> Iterator[None]:
    """Runs what is added to the pipeline, and leaves a cluster when it has finished.

    Raises:
      UserError: a Dask cluster cannot be reached, or its workers die again and again.
    """
    try:
        with pipeline:
            yield
    except Exception as error:
        reason = str(error).partition("\n")[0]
        ours = type(error).__module__.startswith("distributed.")
        if not ours and "trying to connect to" not in reason:
            raise
        raise UserError(f"the Dask cluster failed: {reason}") from error
    finally:
        # Without a result the pipeline did not get as far as running.
        client = getattr(getattr(pipeline, "result", None), "client", None)
        if client is not None:
            client.close()


@contextlib.contextmanager
def _in_one_sentence(output: pathlib.Path) -> Iterator[None]:
    """Makes a `UserError` of what a worker or the disk says."""
    try:
        yield
    except UserError as error:  # Of a worker in this process, or none.
        raise UserError(str(error).partition(" [while running ")[0]) from error
    except RuntimeError as error:  # Of another process: as text.
        told = re.search(
            r"errors\.UserError: (.*?)( \[while running .*)?$", str(error), re.M
        )
        if told is None:
            raise
        raise UserError(told[1]) from error
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from error


def _part_of(
    source: TokenSource, shares: Sequence[TokenSource], packing: windows.Packing
) -> np.ndarray:
    """Returns the part of each symbol, from the first tokens of the source."""
    occurrences = np.zeros(trie.symbol_width(source.vocab_size), np.int64)
    for stream, _, _ in itertools.chain.from_iterable(
        bounded.chunks(share, packing, _SAMPLE_MEMORY) for share in shares
    ):
        occurrences += np.bincount(stream, minlength=occurrences.size)
        if occurrences.sum() >= _SAMPLE_TOKENS:
            break
    if not occurrences.any():
        raise UserError(f"{source.name} holds no text to count: the input is empty.")
    return windows.balanced_parts(occurrences, PARTS)


def sorted_share(
    share: TokenSource, packing: windows.Packing, part_of: np.ndarray, memory: int
) -> Iterator[tuple[int, _Packed]]:
    """Yields the sorted distinct windows of a share, by part."""
    for stream, _, _ in bounded.chunks(share, packing, memory):
        found = windows.sorted_parts(stream, packing, part_of)
        for part, (rows, counts) in enumerate(found.parts):
            if len(rows):
                yield part, (rows.tobytes(), counts.tobytes())


def write_part(folder: str, part: int, pieces: Iterable[_Packed]) -> None:
    """Merges what all shares have of a part into one file: its rows, then its counts.

    The file appears as a whole, however often a worker tries.

    Raises:
      UserError: it cannot be written.
    """
    from apache_beam.io.filesystems import FileSystems

    lists = []
    for packed_rows, packed_counts in pieces:
        counts = np.frombuffer(packed_counts, np.int64)
        rows = np.frombuffer(packed_rows, np.uint64).reshape(counts.size, -1)
        lists.append(windows.Counted(rows.copy(), counts.copy()))
    rows, counts = windows.merged(lists)
    path = FileSystems.join(folder, f"part_{part:05d}")
    temporary = f"{path}.{uuid.uuid4().hex}"
    try:
        with FileSystems.create(temporary) as file:
            file.write(rows.tobytes())
            file.write(counts.tobytes())
        FileSystems.rename([temporary], [path])
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def read_parts(folder: str, packing: windows.Packing) -> windows.SortedWindows:
    """Returns what `write_part` wrote, in order."""
    from apache_beam.io.filesystems import FileSystems

    (found,) = FileSystems.match([FileSystems.join(folder, "part_*")])
    sizes = {
        about.path: about.size_in_bytes // (8 * (packing.words + 1))
        for about in found.metadata_list
        if about.path.rpartition("part_")[2].isdecimal()  # Not one of a failed try.
    }

    def read(path: str) -> windows.Counted:
        with FileSystems.open(path) as file:
            words = np.frombuffer(file.read(), np.uint64)
        rows, counts = np.split(words, [sizes[path] * packing.words])
        return windows.Counted(
            rows.reshape(-1, packing.words).copy(), counts.astype(np.int64)
        )

    parts = parallel.in_order(read, sorted(sizes), parallel.cores())
    return windows.SortedWindows(sum(sizes.values()), len(sizes), parts)
