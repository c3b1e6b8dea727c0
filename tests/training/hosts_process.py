"""One process of a training run on several; `hosts_test` starts it.

    python hosts_process.py CONFIG RUN ROWS ADDRESS COUNT INDEX STOP FAULT

CONFIG is a pickled TrainConfig, RUN the folder of the run, and ROWS a file that
receives the rows that this process read. The FAULT occurs when the process reads batch
STOP, counted from 1 (0 is never): the name of a signal that it sends itself, `error` or
`disk`, after which it cannot write its part of a checkpoint.
"""

import functools
import os
import pickle
import resource
import signal
import sys
import time
from typing import ClassVar

import numpy as np
import orbax.checkpoint as ocp

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.training import hosts, trainer
from bpd_jax.training.exported_params import load_run_parameters

UNLIMITED = resource.getrlimit(resource.RLIMIT_FSIZE)


class Recorded(trainer.RowIterator):
    """Keeps the rows that it returned."""

    rows: ClassVar[list] = []
    stop, fault = 0, ""

    def __next__(self):
        batch = super().__next__()
        self.rows.append(batch.tokens)
        if len(self.rows) == self.stop:
            self.fail()
        elif 0 < self.stop < len(self.rows):
            time.sleep(1.5)  # jax asks for signals once a second.
        return batch

    def fail(self):
        if self.fault == "error":
            raise UserError("the disk of this host is full.")
        if self.fault == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**9, UNLIMITED[1]))
        else:
            os.kill(os.getpid(), signal.Signals[self.fault])


def main() -> None:
    path, run, rows, address, count, index, stop, fault = sys.argv[1:]
    hosts.initialize(address, int(count), int(index), timeout=60, heartbeat_timeout=20)
    with open(path, "rb") as stream:
        config = pickle.load(stream)
    Recorded.stop, Recorded.fault = int(stop), fault
    trainer.RowIterator = Recorded
    load_start = None
    if config.start is not None:
        load_start = functools.partial(
            load_run_parameters, config.start, config.model, None
        )
    if int(index):
        _forbid_folder_access()
    with hosts.together():
        try:
            trainer.train(config, run, load_start=load_start)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, UNLIMITED)
            np.save(rows, np.array(Recorded.rows))


def _forbid_folder_access() -> None:
    """Only process 0 may inspect the run folder: others may see other contents."""

    def forbidden(*args: object) -> None:
        raise AssertionError("only process 0 looks")

    trainer.run_folder.check_usable = forbidden
    trainer.make_run_rows = forbidden
    ocp.CheckpointManager.latest_step = lambda self: None


if __name__ == "__main__":
    with cli.exit_on_errors():
        main()
