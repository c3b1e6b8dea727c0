"""One process of a training run on several; `distributed_test` starts it.

    python train_process.py CONFIG RUN ROWS ADDRESS COUNT INDEX STOP SIGNAL

CONFIG is a pickled TrainConfig, RUN the folder of the run, and ROWS a file that
receives the rows that this process read. The process sends itself SIGNAL when it reads
batch STOP, counted from 1; 0 is never. If STOP is negative, it does so as soon as it
has begun to save for the -STOP-th time.
"""

import functools
import os
import pickle
import signal
import sys
from typing import ClassVar

import numpy as np
import orbax.checkpoint as ocp

from bpd_jax.base import cli
from bpd_jax.training import distributed, trainer
from bpd_jax.training.exported_params import load_run_parameters


class Recorded(trainer.RowIterator):
    """Keeps the rows that it returned."""

    rows: ClassVar[list] = []
    stop = 0
    signal = signal.SIGTERM

    def __next__(self):
        batch = super().__next__()
        self.rows.append(batch.tokens)
        if len(self.rows) == self.stop:
            os.kill(os.getpid(), self.signal)
        return batch


def main() -> None:
    path, run, rows, address, count, index, stop, number = sys.argv[1:]
    distributed.initialize(address, int(count), int(index), timeout=60)
    with open(path, "rb") as stream:
        config = pickle.load(stream)
    Recorded.stop, Recorded.signal = int(stop), int(number)
    trainer.RowIterator = Recorded
    if Recorded.stop < 0:
        _signal_at_save(-Recorded.stop)
    try:
        load_start = None
        if config.start is not None:
            load_start = functools.partial(
                load_run_parameters, config.start, config.model
            )
        if int(index):
            _forbid_folder_access()
        trainer.train(config, run, load_start=load_start)
    finally:
        np.save(rows, np.array(Recorded.rows))


def _signal_at_save(number: int) -> None:
    save, saves = ocp.CheckpointManager.save, []

    def saving(self, *arguments: object, **named: object) -> bool:
        saves.append(save(self, *arguments, **named))
        if len(saves) == number:
            os.kill(os.getpid(), Recorded.signal)
        return saves[-1]

    ocp.CheckpointManager.save = saving


def _forbid_folder_access() -> None:
    """Only process 0 may inspect the run folder: others may see other contents."""

    def forbidden(*args: object) -> None:
        raise AssertionError("only process 0 looks")

    trainer.run_folder.check_usable = forbidden
    trainer.check_space = forbidden
    trainer.make_run_rows = forbidden
    ocp.CheckpointManager.latest_step = lambda self: None


if __name__ == "__main__":
    with cli.exit_on_errors():
        main()
