"""Keeps training going on a TPU slice, whatever becomes of the slice."""

import time
from collections.abc import Callable, Sequence

from bpd_jax.errors import UserError
from experiments.launch.commands import Command, Runner
from experiments.launch.tpu_slice import BUSY, TpuSlice

# States of a slice that does not come back. Of the others, such as CREATING, RESTARTING
# and REPAIRING, it does.
_GONE = ("PREEMPTED", "TERMINATED")
# Errors count together if they happen within so many seconds: a run of days may break
# off now and then.
WINDOW = 6 * 3600.0


def keep_training(
    tpu: TpuSlice,
    commands: Sequence[Command],
    run: Runner,
    state: Callable[[], str],
    *,
    retries: int,
    requests: int,
    pause: float,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Trains to the end, on as many slices as it takes.

    A slice that Cloud has taken back is replaced, however often. On one that is still
    there, a command that ends with an error is tried again after a pause, and all of
    them from the first: training goes on from its newest checkpoint. A run that is
    still at work from an earlier time is waited for.

    Args:
      tpu: the slice.
      commands: what prepares a slice, which may be done again, and at last what trains.
      run: runs a command and returns its exit status.
      state: the slice's state now, "" if there is no such slice.
      retries: errors on a slice that is there, within `WINDOW`, before giving up at the
        next one.
      requests: requests for another slice, one every `pause`, before giving up.
      pause: seconds. Cloud tells the state of a slice that it takes back only after
        a while.
      sleep: waits for so many seconds.
      clock: seconds since some moment.

    Raises:
      UserError: there is no slice to be had, or a command fails by itself.
    """
    found = state()
    if not found:
        status = run(tpu.create())
        if status:
            raise UserError(
                f"could not {tpu.create().about}: gcloud ended with status {status}."
            )
        found = state()
    failures: list[float] = []
    while True:
        _obtain(tpu, found, run, state, requests, pause, sleep)
        for command in commands:
            status = run(command)
            if status:
                break
        else:
            return
        if status == BUSY:
            print(f"# a run is still at work on {tpu.name}: waiting for it", flush=True)
        sleep(pause)
        found = state()
        if found != "READY" or status == BUSY:
            continue
        now = clock()
        failures = [*(then for then in failures if now - then < WINDOW), now]
        if len(failures) > retries:
            raise UserError(
                f"{tpu.name} is there, but an attempt ended with an error "
                f"{len(failures)} times, at last with status {status} "
                f"({command.about}): what it printed tells why; the same command "
                "goes on."
            )


def _obtain(
    tpu: TpuSlice,
    found: str,
    run: Runner,
    state: Callable[[], str],
    requests: int,
    pause: float,
    sleep: Callable[[float], object],
) -> None:
    """Waits for a slice that is on its way, replaces one that does not come back."""
    refused = 0
    while found != "READY":
        if found and found not in _GONE:
            print(f"# {tpu.name} is {found}: waiting", flush=True)
            sleep(pause)
        elif run(tpu.delete() if found else tpu.create()):
            refused += 1
            if refused >= requests:
                raise UserError(
                    f"there was no new slice {tpu.name} in {refused} requests: what "
                    "gcloud printed tells why; the same command goes on."
                )
            sleep(pause)
        found = state()
