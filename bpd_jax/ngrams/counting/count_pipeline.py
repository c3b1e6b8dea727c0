"""Counts n-grams with an Apache Beam pipeline, for text beyond one machine.

    shares of the source                            files, read by many workers
      -> sorted distinct windows, part by part      windows.sorted_parts
      -> GroupByKey                                 the key is the part
      -> one sorted file per part                   windows.merged
    parts, in order -> counts of every order        counts.assemble, locally

The counts are those of `bounded_memory.count`. The parts are ranges of windows of about
equal size, which are estimated from a sample of the text. The last step is one pass
over the parts, which needs the memory of a few parts; the result is written to disk.
"""

import contextlib
import functools
import itertools
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.data import beam_pipelines
from bpd_jax.ngrams import parallel, trie
from bpd_jax.ngrams.counting import bounded_memory, windows
from bpd_jax.ngrams.counting.counts import NGramCounts, assemble
from bpd_jax.ngrams.counting.sources import TokenSource
from bpd_jax.storage import folders, paths
from bpd_jax.storage.paths import as_path, work_place

PARTS = 256
_SAMPLE_TOKENS = 1 << 20
_SAMPLE_MEMORY = 1 << 24  # bytes

_Packed = tuple[bytes, bytes]  # rows and counts


def count_with_beam(
    source: TokenSource,
    output: str | os.PathLike[str],
    *,
    order: int,
    min_counts: Sequence[int] | None = None,
    memory: int = bounded_memory.DEFAULT_MEMORY,
    options: Sequence[str] = (),
    shared_folder: str | None = None,
) -> NGramCounts:
    """Counts with a pipeline and writes the folder of `bounded_memory.count_to_folder`.

    Args:
      source: text or token files; every worker reads some of the files.
      output: folder to write, on this machine.
      order: the highest order N.
      min_counts: per order; None for 1 everywhere.
      memory: bytes of a worker for sorting windows.
      options: options of Beam, as on a command line, such as `--runner=DirectRunner`
        and `--direct_num_workers=2`.
      shared_folder: folder for the results of workers, which this machine reads, on any
        file system that Beam supports; by default `OUTPUT.work`. It is removed at the
        end.
    """
    pipeline = beam_pipelines.make_pipeline(options)
    import apache_beam as beam
    from apache_beam.io.filesystems import FileSystems

    packing = windows.Packing(order, source.vocab_size)
    output = as_path(output)
    folders.check_folder(output, NGramCounts.kind)
    folder = shared_folder or f"{work_place(output)}.work"
    paths.check_plain(folder, "Beam")
    if FileSystems.exists(folder):
        raise UserError(
            f"{folder} exists already: remove it, because a killed pipeline cannot be "
            "resumed, or give another shared folder."
        )
    shares = source.shares()
    part_of = _part_of(source, shares, packing)
    with beam_pipelines.worker_errors(output), contextlib.ExitStack() as stack:
        output.parent.mkdir(parents=True, exist_ok=True)
        FileSystems.mkdirs(folder)
        stack.callback(FileSystems.delete, [folder])
        with pipeline:
            _ = (
                pipeline
                | "shares" >> beam.Create(shares)
                | "spread" >> beam.Reshuffle()
                | "sort" >> beam.FlatMap(sorted_share, packing, part_of, memory)
                | "group" >> beam.GroupByKey()
                | "merge" >> beam.MapTuple(functools.partial(write_part, folder))
            )
        result_folder = stack.enter_context(paths.part(work_place(output), folder=True))
        sorted_windows = read_parts(folder, packing)
        counts = assemble(
            sorted_windows, packing, source.end_of_text, min_counts, result_folder
        )
        counts.save(output)
    return NGramCounts.load(output, verify=False)


def _part_of(
    source: TokenSource, shares: Sequence[TokenSource], packing: windows.Packing
) -> np.ndarray:
    """Returns the part of each symbol, estimated from the beginning of the source."""
    occurrences = np.zeros(trie.symbol_width(source.vocab_size), np.int64)
    for stream, _, _ in itertools.chain.from_iterable(
        bounded_memory.chunks(share, packing, _SAMPLE_MEMORY) for share in shares
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
    for stream, _, _ in bounded_memory.chunks(share, packing, memory):
        sorted_windows = windows.sorted_parts(stream, packing, part_of)
        for part, (rows, counts) in enumerate(sorted_windows.parts):
            if len(rows):
                yield part, (rows.tobytes(), counts.tobytes())


def write_part(folder: str, part: int, pieces: Iterable[_Packed]) -> None:
    """Merges the windows of a part from all shares into one file: rows, then counts.

    The file is created atomically, so that Beam may retry.
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
    """Reads the files of `write_part`, in order."""
    from apache_beam.io.filesystems import FileSystems

    (matches,) = FileSystems.match([FileSystems.join(folder, "part_*")])
    # Number of windows by path, without temporary files of failed attempts.
    sizes = {
        file.path: file.size_in_bytes // (8 * (packing.words + 1))
        for file in matches.metadata_list
        if file.path.rpartition("part_")[2].isdecimal()
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
