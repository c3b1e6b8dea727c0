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


def test_a_disabled_writer_writes_nothing(tmp_path):
    with MetricsWriter(tmp_path, 0, enabled=False) as writer:
        writer.write(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard_the_lines_remain(tmp_path, monkeypatch):
    monkeypatch.setattr("bpd_jax.training.metrics.tensorboard_available", lambda: False)
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(1, {"loss": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
