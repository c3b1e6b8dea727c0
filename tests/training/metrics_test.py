import errno
import json
import math
import struct

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.training.metrics import FILE_NAME, MetricsWriter, finite, read_rows


def test_resumed_run_drops_rows_after_its_checkpoint(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": float(step)})
    with (tmp_path / FILE_NAME).open("a") as stream:
        stream.write('{"step": 4, "lo')
    with MetricsWriter(tmp_path, 2) as writer:
        writer.write(3, {"loss": 30.0})
    assert [row["loss"] for row in read_rows(tmp_path / FILE_NAME)] == [1, 2, 30]


def test_values_that_are_not_finite_are_kept(tmp_path, capsys):
    values = {"validation_loss": math.nan, "a": math.inf, "b": -math.inf, "c": 1.0}
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(1, values)
    for step in (1, 2):
        with MetricsWriter(tmp_path, step) as writer:
            writer.write(step + 1, {"loss": 1.0})
    row = read_rows(tmp_path / FILE_NAME)[0]
    assert math.isnan(row.pop("validation_loss"))
    assert row == {"step": 1, "a": math.inf, "b": -math.inf, "c": 1.0}
    assert finite({"step": 1, **values}) == {"step": 1, "c": 1.0}
    printed = capsys.readouterr()
    assert "damaged" not in printed.out + printed.err


DAMAGED_LINES = [
    "{",
    "\0",
    '{"step": true}',
    "[" * 100_000,
    "7",
    '{"step": 5, "loss": null}',
    '{"step": 5, "loss": "1"}',
    '{"step": 5, "loss": false}',
    '{"step": 5, "loss": [1]}',
    '{"step": 5, "loss": 1' + "0" * 400 + "}",
    '{"step": 1e0}',
    '{"loss": 1}',
]


def test_damaged_lines_are_skipped_with_a_warning(tmp_path, capsys):
    rows = [{"step": step} for step in (1, 2)]
    lines = [json.dumps(rows[0]), *DAMAGED_LINES, json.dumps(rows[1])]
    # The incomplete last line is that of a run that was killed.
    (tmp_path / FILE_NAME).write_text("\n".join([*lines, '{"step": 3, "lo']))
    assert read_rows(tmp_path / FILE_NAME) == rows
    with MetricsWriter(tmp_path, 9) as writer:
        writer.write(10, {"loss": 1.0})
    printed = capsys.readouterr()
    assert "damaged lines, which are skipped: 2, 3, 4, 5, 6, …" in printed.out
    assert read_rows(tmp_path / FILE_NAME) == [*rows, {"step": 10, "loss": 1.0}]
    assert "damaged" not in capsys.readouterr().out


def test_unreadable_log_is_reported(tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(UserError, match="Is a directory"):
        read_rows(tmp_path / FILE_NAME)


def events(folder):
    """The events of a run in the order in which they were written."""
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    records = []
    for path in sorted((folder / "tensorboard").iterdir(), key=lambda p: p.suffix):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            records.append(proto.Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return records


def test_events_of_a_restarted_run_are_dropped(tmp_path):
    for step in (0, 0, 5):
        with MetricsWriter(tmp_path, step) as writer:
            writer.write(step + 1, {"loss": 2.0, "accuracy": 0.5})
    # An event with `session_log` drops what earlier files have from its step on.
    kinds = [
        (event.step, event.WhichOneof("what"))
        for event in events(tmp_path)
        if event.WhichOneof("what") != "file_version"
    ]
    assert kinds == [
        (1, "summary"),
        (1, "session_log"),
        (1, "summary"),
        (6, "session_log"),
        (6, "summary"),
    ]
    values = events(tmp_path)[-1].summary.value
    assert {v.tag: v.simple_value for v in values} == {"loss": 2.0, "accuracy": 0.5}


def test_full_disk_stops_events_but_not_the_run(tmp_path, monkeypatch, capsys):
    record_writer = pytest.importorskip("tensorboardX.record_writer")
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(1, {"loss": 1.0})
        with monkeypatch.context() as patch:
            patch.setattr(record_writer.RecordWriter, "write", FullDisk.write)
            writer.write(2, {"loss": 2.0})
        for step in range(3, 30):  # more than any queue holds
            writer.write(step, {"loss": 3.0})
    assert [row["step"] for row in read_rows(tmp_path / FILE_NAME)] == [*range(1, 30)]
    assert capsys.readouterr().err.count("training continues") == 1


def test_full_disk_drops_rows_but_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
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
        f"warning: cannot write the log of {tmp_path}: No space left on device; "
        "training continues\n"
    )


class FullDisk:
    def __init__(self, stream):
        self.name = stream.name

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")
