import os
import stat
import subprocess
import sys
import threading

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data import text_readers
from bpd_jax.storage import files, paths


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


def test_planted_symlinks_are_not_followed(tmp_path, monkeypatch):
    """Names of temporary files are random, and existing files are not opened."""
    names = []
    for _ in range(2):
        with files.replacing_file(tmp_path / "a") as temporary:
            names.append(temporary.name)
    assert names[0] != names[1]
    monkeypatch.setattr("secrets.token_hex", lambda size: names[0].split(".")[-2])
    (tmp_path / "victim").write_text("precious")
    (tmp_path / names[0]).symlink_to("victim")
    with pytest.raises(UserError, match="cannot write"):
        write(tmp_path / "a", "three")
    assert (tmp_path / "victim").read_text() == "precious"


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


def test_temporary_files_of_killed_processes_can_be_found(tmp_path):
    program = (
        "import os, signal\n"
        "from bpd_jax.storage import files\n"
        f"with files.replacing_file({str(tmp_path / 'a')!r}):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    (left,) = tmp_path.iterdir()
    assert paths.is_temporary(left.name)
    assert left.match(".bpd_jax-a.*.part")  # The pattern of `make clean`.
    assert not paths.is_temporary(".thesis.doc.part")


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
    for read in (files.read_bytes, text_readers.read_text):
        with pytest.raises((ValueError, UserError), match="more than"):
            read(path)
