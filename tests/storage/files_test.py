import gzip
import os
import pathlib
import stat
import subprocess
import sys
import threading

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data import text_readers
from bpd_jax.data.prompts import read_prompts_file
from bpd_jax.ngrams.formats.fst_reader import model_from_fst
from bpd_jax.pretrained.file_parts import joined_file, split_file
from bpd_jax.storage import files, temporaries


def write(path, text):
    with files.replacing_file(path) as temporary:
        temporary.write_text(text)


def test_files_are_replaced_atomically(tmp_path):
    path = tmp_path / "new" / "a.txt"
    write(path, "one")
    assert path.read_text() == "one"
    with pytest.raises(ZeroDivisionError), files.replacing_file(path) as temporary:
        temporary.write_text(str(1 / 0))
    assert path.read_text() == "one"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_check_writable(tmp_path):
    (tmp_path / "file").write_text("one")
    for path, folder in [("file", False), ("", True), ("new/a", False), ("b", True)]:
        files.check_writable(tmp_path / path, folder=folder)
    for path, folder, message in [
        ("file", True, "it is a file; name a folder"),
        ("", False, "it is a folder; name a file"),
        ("file/a", False, "cannot write"),
        ("\0", False, "cannot write"),
    ]:
        with pytest.raises(UserError, match=message):
            files.check_writable(tmp_path / path, folder=folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "new"]
    assert (tmp_path / "file").read_text() == "one"
    assert not list((tmp_path / "new").iterdir())


def test_target_of_a_symlink_is_replaced(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("there/file")  # Which does not exist yet.
    for text in ("one", "two"):
        files.check_writable(link)
        write(link, text)
        assert link.is_symlink()
        assert (tmp_path / "there" / "file").read_text() == text
    link.unlink()
    link.symlink_to("link")
    with pytest.raises(UserError, match="loop"):
        write(link, "three")


def test_devices_are_written_in_place():
    before = os.stat("/dev/null")
    files.check_writable("/dev/null")
    write("/dev/null", "gone")
    assert stat.S_ISCHR(before.st_mode)
    assert os.path.samestat(os.stat("/dev/null"), before)
    with pytest.raises(UserError, match="No space left"):
        write("/dev/full", "much")


def test_pipes_are_written_in_place(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    files.check_writable(pipe)
    write(pipe, "text")
    reader.join()
    assert received == ["text"]
    assert pipe.is_fifo()


def test_redirected_stdout_is_written(tmp_path):
    program = (
        "from bpd_jax.storage import files\n"
        "with files.replacing_file('/dev/stdout') as path: path.write_text('text')"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
        assert os.path.samestat(os.fstat(out.fileno()), os.stat(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "text"


def test_planted_symlinks_are_not_followed(tmp_path, monkeypatch):
    """Names of temporary files are random, and existing files are not opened."""
    names = []
    for text in ("one", "two"):
        with files.replacing_file(tmp_path / "a") as temporary:
            names.append(temporary.name)
            temporary.write_text(text)
    assert names[0] != names[1]
    (tmp_path / "victim").write_text("precious")
    candidates = iter(["planted", "free"])
    monkeypatch.setattr("tempfile._get_candidate_names", lambda: candidates)
    planted = names[0].replace(names[0].split(".")[-2], "planted")
    (tmp_path / planted).symlink_to("victim")
    with files.replacing_file(tmp_path / "a") as temporary:
        assert ".free." in temporary.name
        temporary.write_text("three")
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "a").read_text() == "three"


def test_permissions_are_kept(tmp_path):
    path = tmp_path / "a"
    umask = os.umask(0o027)
    try:
        write(path, "one")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o600)
    write(path, "two")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_files_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr("os.fsync", lambda fd: (steps.append("sync"), fsync(fd)))
    monkeypatch.setattr("os.replace", lambda *a: (steps.append("name"), replace(*a)))
    write(tmp_path / "a", "one")
    assert steps == ["sync", "name", "sync"]  # The file, its name, the folder.


KILLED = """
import os, pathlib, signal, sys
from bpd_jax.storage import files, folders
path = pathlib.Path(sys.argv[1])
kind = folders.FolderKind("a test", "marker")
with files.replacing_file(path / "a") as file, files.replacing_file(path / "b"):
    with folders.replacing_folder(path / "f", kind) as folder:
        file.write_text("half")
        (folder / "half").write_text("half")
        print("ready", flush=True)
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdin.read()
"""


@pytest.mark.parametrize("action", ["kill", "wait"])
def test_temporary_files_of_dead_processes_are_removed(tmp_path, action):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, os.fspath(tmp_path), action],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).parent.parent,
    )
    assert child.stdout.readline() == "ready\n"
    if action == "kill":
        child.wait()

    def remainders():
        return sorted(p.name.split(".")[1] for p in tmp_path.glob(".*.part"))

    assert remainders() == ["a", "b", "f"]
    write(tmp_path / "a", "whole")
    # Files of a live process are kept, and so are those of other outputs.
    assert remainders() == (["b", "f"] if action == "kill" else ["a", "b", "f"])
    temporaries.remove_remainders(tmp_path)
    assert remainders() == ([] if action == "kill" else ["a", "b", "f"])
    child.communicate("")
    assert remainders() == []
    assert (tmp_path / "a").read_text() == ("whole" if action == "kill" else "half")


def test_integers_beyond_float64_are_refused():
    largest = int(sys.float_info.max)
    assert files.parse_json(f"[{10**307}, -{2**70}]") == [10**307, -(2**70)]
    for number in (10 * largest, -10 * largest):
        with pytest.raises(ValueError, match="beyond the range"):
            files.parse_json(f'{{"a": {number}}}')


def test_size_limit_of_reading(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert files.read_bytes(path, 5) == files.read_bytes(path, None) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        files.read_bytes(path, 4)
    assert files.read_bytes("/proc/self/stat")  # A regular file of size 0.
    with pytest.raises(ValueError, match="more than 9 bytes"):
        files.read_bytes("/dev/zero", 9)
    # The size is checked before memory is allocated.
    os.truncate(path, 1 << 40)
    for read in (files.read_bytes, text_readers.read_text, model_from_fst):
        with pytest.raises((ValueError, UserError), match=r"more than|not a file of"):
            read(path)


def test_endless_devices_are_refused(monkeypatch):
    monkeypatch.setattr(files, "_MOST_BYTES", 1 << 20)
    for read in (text_readers.read_text, model_from_fst):
        with pytest.raises(UserError, match="more than 1,048,576 bytes"):
            read("/dev/zero")
    with pytest.raises(UserError, match="line 1, has more than"):
        list(text_readers.read_lines("/dev/zero"))


def test_device_instead_of_a_part_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    split_file(tmp_path / "empty", tmp_path / "parts", 9)
    (tmp_path / "parts" / "part_001").unlink()
    (tmp_path / "parts" / "part_001").symlink_to("/dev/zero")
    with (
        pytest.raises(UserError, match="part_001 is damaged"),
        joined_file(tmp_path / "parts"),
    ):
        pass


def test_length_of_a_line_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_LINE", 10)
    path = tmp_path / "lines.gz"
    with gzip.open(path, "wb") as stream:
        stream.write(b"123456789\n" * 3 + b"1234567890\n")
    lines = text_readers.read_lines(path)
    assert [next(lines)[0] for _ in range(3)] == [1, 2, 3]
    with pytest.raises(UserError, match="line 4, has more than 10 bytes"):
        next(lines)


def test_total_size_of_kept_lines_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_KEPT", 10 * (files.LINE_COST + 2))
    for name, line in {"a.txt.gz": b"a\n", "a.jsonl.gz": b'{"prompt": "a"}\n'}.items():
        path = tmp_path / name
        path.write_bytes(gzip.compress(line * 11))
        with pytest.raises(UserError, match="too large to be kept in memory"):
            read_prompts_file(path)
        # A file that is read line by line may have any number of lines.
        assert len(list(text_readers.read_lines(path))) == 11
    (tmp_path / "few.txt").write_bytes(b"a\n" * 10)
    assert read_prompts_file(tmp_path / "few.txt") == ["a"] * 10
