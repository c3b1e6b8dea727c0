"""Resumable counting of any amount of text in bounded memory, on all cores."""

import os
from collections.abc import Iterator, Sequence

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting import sorted_runs, windows
from bpd_jax.ngrams.counting.counts import NGramCounts, assemble
from bpd_jax.ngrams.counting.sources import TokenSource
from bpd_jax.storage import folders
from bpd_jax.storage.paths import as_path, work_place

DEFAULT_MEMORY = 4_000_000_000  # bytes


def count(
    source: TokenSource,
    work_folder: str | os.PathLike[str],
    *,
    order: int,
    min_counts: Sequence[int] | None = None,
    memory: int = DEFAULT_MEMORY,
) -> NGramCounts:
    """Counts the n-grams of orders 1 ... `order` of a source.

    Text that fits into memory is counted there. More text is written to sorted runs on
    disk, which are then merged (`sorted_runs`). A run takes 8 W + 4 bytes per distinct
    window, where W is 1, or 2 for long n-grams of large vocabularies. The counts are
    the same.

    Counting needs about `memory` and some tens of megabytes, whatever the size of the
    text and of the result, but a single document must fit. (Pages of mapped files come
    on top while there is free memory.) A killed count resumes after its last complete
    run if it is called again with the same work folder, order and source; `min_counts`
    and `memory` may differ.

    Args:
      work_folder: folder for runs and for a result larger than memory, which is mapped
        from there: it must be kept until the result is saved.
      order: the highest order N.
      min_counts: per order, see `counts.with_min_counts`; None for 1 everywhere.
    """
    packing = windows.Packing(order, source.vocab_size)
    settings = {
        "order": order,
        "vocab_size": source.vocab_size,
        "end_of_text": source.end_of_text,
        "source": source.fingerprint(),
    }
    run_folder = sorted_runs.RunFolder(work_folder, packing.words, settings)
    sorted_windows = _sorted_windows(source, packing, memory, run_folder)
    result_folder = work_folder if len(run_folder) else None
    try:
        return assemble(
            sorted_windows, packing, source.end_of_text, min_counts, result_folder
        )
    except OSError as error:
        raise UserError(
            f"cannot write the counts to {work_folder}: {error.strerror or error}; "
            "the runs counted so far are kept."
        ) from error


def _sorted_windows(
    source: TokenSource,
    packing: windows.Packing,
    memory: int,
    run_folder: sorted_runs.RunFolder,
) -> windows.SortedWindows:
    """Returns the sorted windows of the source, in memory or from runs.

    Args:
      memory: bytes for the windows of a chunk of the source, or for all windows and the
        result.
      run_folder: folder of the runs, which may contain those of a killed count.
    """
    # At most one n-gram of each order begins at a symbol.
    result_bytes = _window_bytes(packing) + 24 * packing.order
    if not run_folder.complete:
        for stream, sequences, last in chunks(
            source, packing, memory, skip=run_folder.sequences
        ):
            sorted_chunk = windows.sorted_parts(stream, packing)
            fits = stream.size * result_bytes <= memory
            if last and not len(run_folder) and fits:
                return sorted_chunk
            bar = progress.bar(
                sorted_chunk.parts,
                label=f"sort run {len(run_folder) + 1}",
                total=sorted_chunk.number,
                unit=" parts",
            )
            run_folder.append(bar, sequences)
            del stream, sorted_chunk, bar  # Free memory before the next chunk.
        if not len(run_folder):
            raise UserError(
                f"{source.name} holds no text to count: the input is empty."
            )
        run_folder.finish()
    return run_folder.merge(memory)


def _window_bytes(packing: windows.Packing) -> int:
    """Bytes of sorting per symbol: the symbol twice, its window, index and count."""
    return 8 * packing.words + 16


def chunks(
    source: TokenSource, packing: windows.Packing, memory: int, skip: int = 0
) -> Iterator[tuple[np.ndarray, int, bool]]:
    """Yields streams of symbols whose windows can be sorted within `memory`.

    A stream exceeds it only if a single batch of the source does.

    Args:
      skip: number of sequences to skip at the beginning.

    Yields:
      The stream `[T]` int32, its number of sequences, and whether it is the last one.
    """
    room = min(memory // _window_bytes(packing), sorted_runs.MOST_WINDOWS)
    pieces: list[np.ndarray] = []
    sequences, size = 0, 0
    number = 1 + skip
    for batch in source.batches(skip):
        piece = windows.add_boundaries(
            batch,
            vocab_size=source.vocab_size,
            end_of_text=source.end_of_text,
            first=number,
            name=source.name,
        )
        number += batch.lengths.size
        if pieces and size + piece.size > room:
            yield _joined(pieces), sequences, False
            sequences, size = 0, 0
        pieces.append(piece)
        sequences += batch.lengths.size
        size += piece.size
    if pieces:
        yield _joined(pieces), sequences, True


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    """Concatenates arrays and clears the list, to free their memory."""
    joined = np.concatenate(pieces)
    pieces.clear()
    return joined


def count_to_folder(
    source: TokenSource,
    output: str | os.PathLike[str],
    *,
    order: int,
    min_counts: Sequence[int] | None = None,
    memory: int = DEFAULT_MEMORY,
) -> NGramCounts:
    """Counts a source and writes a folder that `NGramCounts.load` reads; see `count`.

    The work folder is `OUTPUT.work`. It is removed at the end; after a kill it remains,
    and another call resumes.
    """
    output = as_path(output)
    folders.check_folder(output, NGramCounts.kind)
    work = work_place(output.with_name(f"{output.name}.work"))
    counts = count(source, work, order=order, min_counts=min_counts, memory=memory)
    counts.save(output)
    folders.remove_folder(work, sorted_runs.KIND)
    return NGramCounts.load(output, verify=False)
