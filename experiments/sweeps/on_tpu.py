"""Runs the points of a sweep on a pool of TPU slices."""

import base64
import dataclasses
import gzip
import io
import pathlib
import queue
import tarfile
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from experiments.launch.commands import Command, Runner
from experiments.launch.tpu_keep import (
    Keeper,
    NoSlicesError,
    Patience,
    RunEndedError,
    StoppedError,
)
from experiments.launch.tpu_slice import TpuSlice
from experiments.launch.tpu_state import Asker, Condition, Status

# Polling interval of an idle slice.
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Slices that share the points of a sweep.

    Attributes:
      tpus: the requests for slices, with distinct names.
      prepare: the commands that prepare the slices, by the name of the request.
      run: prints and runs a command, and returns its exit status.
      status: returns the state of slices.
      fetch: copies the results so far to this machine.
      patience: limits on retries.
      delete: whether to delete each request when no point is left for it.
    """

    tpus: Sequence[TpuSlice]
    prepare: Mapping[str, Sequence[Command]]
    run: Runner
    status: Callable[[TpuSlice], Status]
    fetch: Callable[[TpuSlice], None]
    patience: Patience
    delete: bool = False

    def wait_for_earlier_runs(self) -> None:
        """Follows runs of an earlier launcher, so that no point is trained twice.

        Raises:
          UserError: a slice cannot be reached, or its run was stopped on request.
        """
        # All are queried first: the user is present to fix a failure of gcloud.
        ready = [
            tpu for tpu in self.tpus if self.status(tpu).condition is Condition.READY
        ]
        for tpu in ready:
            self._keeper(tpu).wait()
            self.fetch(tpu)

    def _keeper(
        self, tpu: TpuSlice, stopped: Callable[[], bool] = lambda: False
    ) -> Keeper:
        return Keeper(
            tpu,
            self.run,
            lambda: self.status(tpu),
            self.patience,
            stopped=stopped,
        )

    def train(self, points: Mapping[str, tuple[str, ...]], stamp: str) -> list[str]:
        """Trains every point; an idle slice takes the next one.

        Args:
          points: name -> the command that trains it.
          stamp: prefix of the IDs of the runs, unique to the launcher.

        Returns:
          The names of points that were not trained to the end, in order. When a run is
          stopped on request, no further point is started. A slice that cannot be
          reached or set up gets no further point either, and is not deleted, because a
          run may be in progress on it.
        """
        waiting: queue.SimpleQueue[tuple[str, tuple[str, ...]]] = queue.SimpleQueue()
        for point in points.items():
            waiting.put(point)
        trained: set[str] = set()
        failed: set[str] = set()
        stopped = threading.Event()
        kept: list[str] = []
        fetching = threading.Lock()

        def work(tpu: TpuSlice) -> None:
            while not stopped.is_set():
                try:
                    name, words = waiting.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    if len(trained | failed) == len(points):
                        break
                    continue  # The point of a lost slice may be queued again.
                progress.say(f"# {tpu.name} trains {name}")
                try:
                    number = list(points).index(name)
                    self._keeper(tpu, stopped.is_set).train(
                        self.prepare[tpu.name], words, f"{stamp}-{number}", stamp
                    )
                    trained.add(name)
                except NoSlicesError as error:
                    waiting.put((name, words))  # for another slice
                    progress.say(f"error: {error}")
                    return
                except RunEndedError as error:
                    failed.add(name)
                    if isinstance(error, StoppedError):
                        stopped.set()
                    progress.say(f"error: {name}: {error}")
                except UserError as error:
                    failed.add(name)
                    progress.say(f"error: {name}: {error}")
                    return
                except BaseException:
                    failed.add(name)  # Otherwise the other threads would wait for it.
                    raise
                with fetching:
                    self.fetch(tpu)
            if self.delete:
                try:
                    keeper = self._keeper(tpu)
                    if keeper.known_status().condition is not Condition.ABSENT:
                        keeper.give_back()
                except UserError as error:
                    progress.say(f"error: {error}")
                    kept.append(tpu.name)

        threads = [
            threading.Thread(target=work, args=(tpu,), daemon=True) for tpu in self.tpus
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if kept:
            raise UserError(
                f"could not delete {', '.join(kept)}, which are still billed: see the "
                "errors above."
            )
        return [name for name in points if name not in trained]


def fetch(tpu: TpuSlice, folder: pathlib.Path, asker: Asker) -> None:
    """Copies the results of the runs in a folder of the share to the same folder here.

    Args:
      tpu: slices that mount the share.
      folder: path relative to the share, and to the working directory.
      asker: runs a command.
    """
    status, out, err = asker(tpu.fetch(str(folder)))
    try:
        if status:
            raise OSError(err.rpartition("\n")[2] or f"status {status}")
        # Decompressed completely first, so that a truncated archive replaces nothing.
        archive = io.BytesIO(gzip.decompress(base64.b64decode(out)))
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=archive, mode="r:") as members:
            members.extractall(folder, filter="data")
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
        line = str(error).partition("\n")[0]
        progress.say(f"warning: could not fetch results from {tpu.name}: {line}")
