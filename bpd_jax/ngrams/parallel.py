"""Parallel map over an iterator, with results in order."""

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_order(
    function: Callable[[_Item], _Result], items: Iterable[_Item], threads: int
) -> Iterator[_Result]:
    """Yields `function(item)` for every item, in order, computed by threads.

    At most `threads + 1` results are computed ahead, which bounds the memory.
    """
    with futures.ThreadPoolExecutor(threads) as pool:
        waiting: collections.deque[futures.Future[_Result]] = collections.deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
