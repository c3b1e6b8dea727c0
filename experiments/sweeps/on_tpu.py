"""Points of a sweep, queued onto TPU slices."""

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

from bpd_jax import progress
from bpd_jax.errors import UserError
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

# How often a slice without work looks whether there is any.
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Slices that share the points of a sweep.

    Attributes:
      tpus: the requests for slices, each with a name of its own.
      prepare: by that name, the commands that prepare the slices.
      run: shows and runs a command, and returns its exit status.
      status: what has become of slices.
      fetch: brings what was measured so far to this machine.
      patience: when to give up.
      delete: whether each request is given back once there is no point left for it.
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
        # All are asked at first, while somebody is there to mend a gcloud that fails.
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
        """Trains every point; each slice takes the next one when it is free.

        Args:
          points: name -> the command that trains it.
          stamp: begins the IDs of the runs; another one for every launcher.

        Returns:
          The names of points that were not trained to their end, in order. When a
          run is stopped on request, no further point begins. A slice that cannot be
          reached or set up gets no further point either, and is not given back,
          because a run may be in progress on it.
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
                    continue  # A point of a slice that is lost may come back.
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
                    failed.add(name)  # Otherwise the other slices would wait for it.
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
                f"could not give back {', '.join(kept)}, which are still paid for: see "
                "the errors above."
            )
        return [name for name in points if name not in trained]


def fetch(tpu: TpuSlice, folder: pathlib.Path, asker: Asker) -> None:
    """Copies what the runs in a folder of the share have measured to the same one here.

    Args:
      tpu: slices that mount the share.
      folder: relative to the share, and to the working directory.
      asker: runs a command.
    """
    status, out, err = asker(tpu.fetch(str(folder)))
    try:
        if status:
            raise OSError(err.rpartition("\n")[2] or f"status {status}")
        # As a whole, so that a truncated archive replaces nothing.
        archive = io.BytesIO(gzip.decompress(base64.b64decode(out)))
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=archive, mode="r:") as members:
            members.extractall(folder, filter="data")
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
        line = str(error).partition("\n")[0]
        progress.say(f"warning: could not fetch results from {tpu.name}: {line}")
