"""Counts n-grams of any amount of text in bounded memory, on all cores, resumably."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np

from bpd_jax import folders, progress
from bpd_jax.buckets import as_path, on_disk
from bpd_jax.errors import UserError
from bpd_jax.ngrams import storage
from bpd_jax.ngrams.counting import levels, runs, windows
from bpd_jax.ngrams.counting.counts import (
    NGramCounts,
    check_min_counts,
    check_order,
    from_levels,
    with_min_counts,
)
from bpd_jax.ngrams.counting.sources import TokenSource

DEFAULT_MEMORY = 4_000_000_000  # bytes
_LEAST_MEMORY = 1_000_000


def count(
    source: TokenSource,
    *,
    order: int,
    min_counts: Sequence[int] | None = None,
    memory: int = DEFAULT_MEMORY,
    work_folder: str | os.PathLike[str] | None = None,
) -> NGramCounts:
    """Counts the n-grams of orders 1 ... `order` of a source.

    What fits into memory is counted there. More text becomes sorted runs on disk, which
    are then merged (`runs` in this folder): 8 W + 4 bytes per different window, W being
    1 or, for long n-grams of large vocabularies, 2. The counts do not depend on which.

    With a work folder the memory taken is about `memory` and some tens of megabytes,
    whatever the size of the text and of the result, except that a single document must
    fit. (Pages of mapped files come on top while there is room.) A killed count goes on
    after its last whole run if it is called again with the same work folder; order
    and source must be the same, `min_counts` and `memory` may differ. Without one, the
    result comes in addition, 24 bytes per n-gram and 16 for those of the highest order,
    and nothing can be resumed.

    Args:
      source: what to count.
      order: the highest order N.
      min_counts: per order, see `counts.with_min_counts`, or None for 1 everywhere.
      memory: bytes.
      work_folder: for runs and for a result larger than memory, which is mapped from
        there: it must be kept until the result is saved.

    Raises:
      UserError: the source or an argument is at fault, the disk is full, or the work
        folder is that of another count.
    """
    check_order(order)
    if memory < _LEAST_MEMORY:
        raise UserError(
            f"memory is {memory} bytes: give {_LEAST_MEMORY:,} or more, best some "
            "billions."
        )
    if min_counts is not None:
        check_min_counts(min_counts, order)
    packing = windows.Packing(order, source.vocab_size)
    with contextlib.ExitStack() as stack:
        folder = work_folder
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        settings = {
            "order": order,
            "vocab_size": source.vocab_size,
            "end_of_text": source.end_of_text,
            "source": source.fingerprint(),
        }
        found = runs.RunFolder(folder, packing.words, settings)
        limit = memory if work_folder is not None else None
        sorted_windows = _sorted_windows(source, packing, memory, limit, found)
        spilled = work_folder if len(found) else None
        try:
            return assemble(sorted_windows, packing, source, min_counts, spilled)
        except OSError as error:
            raise UserError(
                f"cannot write the counts to {folder}: {error.strerror or error}; "
                "what was counted so far is kept."
            ) from error


def assemble(
    sorted_windows: windows.SortedWindows,
    packing: windows.Packing,
    source: TokenSource,
    min_counts: Sequence[int] | None,
    folder: str | os.PathLike[str] | None,
) -> NGramCounts:
    """Returns the counts that sorted windows have, in memory or mapped from `folder`.

    Only minimum counts that fall with the order take the memory of a result with the
    lowest of those numbers.

    Args:
      sorted_windows: all of a source.
      packing: theirs.
      source: what they are of.
      min_counts: per order, or None for 1 everywhere.
      folder: see `levels.assemble`.

    Raises:
      OSError: the folder cannot be written.
    """
    least = None
    if min_counts is not None:
        # What is below this was seen too rarely in its own order and in all above it,
        # so nothing that stays needs it. These numbers never fall.
        least = [min(min_counts[n : packing.order]) for n in range(packing.order)]
    result = levels.assemble(sorted_windows, packing, least, folder)
    counts = from_levels(result, source.vocab_size, source.end_of_text)
    if min_counts is not None and least != list(min_counts[: packing.order]):
        counts = with_min_counts(counts, min_counts)
    return counts


def _sorted_windows(
    source: TokenSource,
    packing: windows.Packing,
    memory: int,
    limit: int | None,
    found: runs.RunFolder,
) -> windows.SortedWindows:
    """Returns the windows of the source, from memory or from runs.

    Args:
      source: what to count.
      packing: of the windows.
      memory: bytes for the windows of a chunk of the source.
      limit: bytes for windows and result together, or None.
      found: where the runs go, and where those of an earlier try are.
    """
    # A symbol begins at most one n-gram of each order.
    result_bytes = _window_bytes(packing) + 24 * packing.order
    if not found.complete:
        for stream, sequences, last in chunks(
            source, packing, memory, skip=found.sequences
        ):
            whole = windows.sorted_parts(stream, packing)
            fits = limit is None or stream.size * result_bytes <= limit
            if last and not len(found) and fits:
                return whole
            label = f"sort run {len(found) + 1}"
            bar = progress.bar(
                whole.parts, label=label, total=whole.number, unit=" parts"
            )
            found.append(bar, sequences)
            del stream, whole, bar  # Before the next stream is gathered.
        if not len(found):
            raise UserError(
                f"{source.name} holds no text to count: the input is empty."
            )
        found.finish()
    return found.merge(memory)


def _window_bytes(packing: windows.Packing) -> int:
    """What sorting takes per symbol: itself twice, its window, a place and a count."""
    return 8 * packing.words + 16


def chunks(
    source: TokenSource, packing: windows.Packing, memory: int, skip: int = 0
) -> Iterator[tuple[np.ndarray, int, bool]]:
    """Yields streams whose windows can be sorted in so many bytes.

    A stream is longer only if a single batch of the source is.

    Args:
      source: what to read.
      packing: of the windows.
      memory: bytes.
      skip: sequences to leave out at the beginning.

    Yields:
      The stream `[T]` int32, how many sequences it has, and whether it is the last.

    Raises:
      UserError: the source is at fault.
    """
    room = min(memory // _window_bytes(packing), runs.MOST_WINDOWS)
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
    """Joins arrays and lets go of them."""
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
    """Counts and writes a folder that `NGramCounts.load` reads; see `count`.

    The work folder is `OUTPUT.work`, removed at the end and left by a kill, so that
    calling this again goes on.

    Raises:
      UserError: as `count`; or `output` is there and holds something else.
    """
    output = as_path(output)
    folders.check_folder(output, storage.KINDS["counts"])
    work = on_disk(output.with_name(f"{output.name}.work"))
    counts = count(
        source, order=order, min_counts=min_counts, memory=memory, work_folder=work
    )
    counts.save(output)
    folders.remove_folder(work, runs.KIND)
    return NGramCounts.load(output, verify=False)
