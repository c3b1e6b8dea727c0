import errno
import pathlib
import sys
import types

from bpd_jax.training.metrics import FILE_NAME, MetricsWriter, read_rows


def test_rows_come_back(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(1, {"loss": 2.5})
        writer.write(2, {"loss": 2.25, "tokens_per_second": 100.0})
    assert read_rows(tmp_path / FILE_NAME) == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": 2.25, "tokens_per_second": 100.0},
    ]


def test_a_resumed_run_drops_what_lies_after_its_checkpoint(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": float(step)})
    with (tmp_path / FILE_NAME).open("a") as stream:
        stream.write('{"step": 4, "lo')
    with MetricsWriter(tmp_path, 2) as writer:
        writer.write(3, {"loss": 30.0})
    assert [row["loss"] for row in read_rows(tmp_path / FILE_NAME)] == [1, 2, 30]


def test_without_tensorboard_the_lines_remain(tmp_path, monkeypatch):
    monkeypatch.setattr("bpd_jax.training.metrics.tensorboard_available", lambda: False)
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(1, {"loss": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_events_of_a_run_that_begins_anew_are_dropped(tmp_path, monkeypatch):
    purged = []

    class Recorded:
        def __init__(self, folder, purge_step):
            purged.append(purge_step)
            pathlib.Path(folder).mkdir(exist_ok=True)

        def close(self):
            pass

    module = types.SimpleNamespace(SummaryWriter=Recorded)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    monkeypatch.setattr("bpd_jax.training.metrics.tensorboard_available", lambda: True)
    for step in (0, 0, 5):
        with MetricsWriter(tmp_path, step):
            pass
    assert purged == [None, 1, 6]


def test_a_full_disk_costs_rows_but_not_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bpd_jax.training.metrics.tensorboard_available", lambda: False)
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(1, {"loss": 1.0})
        with monkeypatch.context() as patch:
            patch.setattr(writer, "_file", FullDisk(writer._file))
            writer.write(2, {"loss": 2.0})
            writer.write(3, {"loss": 3.0})
        writer.write(4, {"loss": 4.0})
    assert [row["step"] for row in read_rows(tmp_path / FILE_NAME)] == [1, 4]
    assert capsys.readouterr().err == (
        f"warning: cannot write {tmp_path / FILE_NAME}: No space left on device; "
        "training continues\n"
    )


class FullDisk:
    def __init__(self, stream):
        self.name = stream.name

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")
