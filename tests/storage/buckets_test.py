"""Paths under gs://, against a storage server in this process."""

import os
import pathlib
import signal
import threading

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.storage import artifacts, buckets, files, folders
from bpd_jax.storage.buckets import BucketPath, as_path
from tests.commands import forked

BUCKET = "gs://bpd-test"
KIND = artifacts.Artifact("a letter", "letter.json", ("*.npz",), remedy="write it anew")


@pytest.fixture(autouse=True)
def empty_bucket(request):
    """An empty bucket without a hook, for the tests that use one."""
    if "storage" in request.fixturenames:
        request.getfixturevalue("storage").clear()


def put(storage, name, data):
    return storage.put("bpd-test", name, data)


def names(storage):
    return sorted(storage.objects["bpd-test"])


def read_values(folder):
    """The elements of all arrays of a letter."""
    return {
        int(number)
        for path in as_path(folder).glob("*.npz")
        for number in np.load(path)["x"]
    }


def write_letter(folder, count=3, value=1):
    with folders.replacing_folder(folder, KIND) as temporary:
        for number in range(count):
            np.savez(temporary / f"{number}.npz", x=np.full(4, value))
        KIND.write_header(temporary, {"count": count})


def test_only_names_under_gs_are_bucket_paths(tmp_path):
    assert type(as_path(str(tmp_path))) is type(tmp_path)
    path = as_path("gs://b/a") / "c.txt"
    assert isinstance(path, BucketPath)
    assert str(path) == f"{path}" == "gs://b/a/c.txt"
    assert (path.bucket, path.key, path.name) == ("b", "a/c.txt", "c.txt")
    assert str(path.with_suffix(".gz").parent) == "gs://b/a"
    assert as_path(pathlib.Path("gs://b/a/c.txt")) == path
    for bad in ("gs://", "gs://b/../c"):
        with pytest.raises(UserError, match="gs://bucket"):
            as_path(bad)
    for url in ("s3://b/a", "file:///etc", "hdfs://h/a"):
        with pytest.raises(UserError, match="not supported"):
            as_path(url)
    assert as_path("a:b/c") == pathlib.Path("a:b/c")


def test_missing_package_is_reported(monkeypatch):
    buckets._client.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "google.cloud.storage", None)
    with pytest.raises(UserError, match=r"bpd_jax\[gcs\]"):
        as_path("gs://b/a").exists()


def test_bucket_paths_behave_like_local_paths(storage):
    for name in ("a/b.txt", "a/c/d.txt", "a/c/e.md", "ab.txt"):
        put(storage, name, name.encode())
    top = as_path(BUCKET) / "a"
    assert (top.is_dir(), top.is_file()) == (True, False)
    file = top / "b.txt"
    assert (file.is_dir(), file.is_file()) == (False, True)
    assert not (top / "b").exists()
    assert not as_path(f"{BUCKET}/x").exists()
    assert [path.name for path in top.iterdir()] == ["b.txt", "c"]
    assert list(top.glob("*/*.txt")) == [top / "c" / "d.txt"]
    assert {path.name for path in top.rglob("*.txt")} == {"b.txt", "d.txt"}
    assert (top / "c" / "d.txt").stat().st_size == 9
    assert (top / "b.txt").read_text() == "a/b.txt"
    with pytest.raises(FileNotFoundError):
        (top / "b").read_bytes()
    with pytest.raises(FileNotFoundError):
        list((top / "nothing").iterdir())
    with pytest.raises(IsADirectoryError):
        os.stat(top)
    with pytest.raises(OSError, match="in place"):
        (top / "b.txt").open("a")


def test_local_copies_are_reused_until_the_object_changes(storage):
    path = as_path(f"{BUCKET}/x.bin")
    put(storage, "x.bin", b"first")
    first = np.memmap(path, mode="r")
    assert path.read_bytes() == b"first"
    assert storage.downloads() == ["x.bin"]
    put(storage, "x.bin", b"other")
    assert path.read_bytes() == b"other"
    assert storage.downloads() == ["x.bin"] * 2
    assert bytes(first) == b"first"  # Open maps keep the old content.
    assert len(list(path.local().parent.parent.glob("@*/x.bin"))) == 1


def test_local_copies_are_synced_before_they_are_renamed(storage, monkeypatch):
    put(storage, "x.bin", b"first")
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr("os.fsync", lambda fd: (steps.append("sync"), fsync(fd)))
    monkeypatch.setattr("os.replace", lambda *a: (steps.append("name"), replace(*a)))
    assert as_path(f"{BUCKET}/x.bin").read_bytes() == b"first"
    assert steps == ["sync", "name"]


def test_incomplete_downloads_are_refused(storage):
    put(storage, "x.json", b"[1]").reported = 4
    with pytest.raises(OSError, match="3 of 4 bytes"):
        as_path(f"{BUCKET}/x.json").read_text()
    stored = put(storage, "m/letter.json", b'{"format": 1}')
    stored.reported = 14
    with pytest.raises(UserError, match=r"13 of 14 bytes.*write it anew"):
        KIND.read_header(f"{BUCKET}/m")


def test_files_are_replaced_when_the_upload_is_complete(storage):
    path = f"{BUCKET}/a/text.txt"
    files.check_writable(path)
    with files.replacing_file(path) as temporary:
        temporary.write_text("one\r\ntwo")
        assert names(storage) == []
    assert storage.objects["bpd-test"]["a/text.txt"].data == b"one\r\ntwo"
    with pytest.raises(ZeroDivisionError), files.replacing_file(path) as temporary:
        temporary.write_text(str(1 / 0))
    assert as_path(path).read_bytes() == b"one\r\ntwo"
    large = os.urandom(9 << 20)  # In several requests.
    with files.replacing_file(path) as temporary:
        temporary.write_bytes(large)
    assert as_path(path).read_bytes() == large
    assert not list(buckets.staging(as_path(path)).parent.iterdir())


def test_missing_bucket_is_reported_before_writing(storage):
    for check in (files.check_writable, lambda path: folders.check_folder(path, KIND)):
        with pytest.raises(UserError, match=r"cannot write gs://no-such-bucket/x.*not"):
            check("gs://no-such-bucket/x")


def test_folders_of_another_kind_are_unchanged(storage):
    put(storage, "theirs/photo.jpg", b"...")
    with pytest.raises(UserError, match=r"photo\.jpg"):
        write_letter(f"{BUCKET}/theirs")
    with pytest.raises(UserError, match="is a folder"):
        files.check_writable(f"{BUCKET}/theirs")
    with pytest.raises(UserError, match=r"photo\.jpg"):
        folders.remove_folder(f"{BUCKET}/theirs", KIND)
    assert names(storage) == ["theirs/photo.jpg"]


def test_a_folder_is_replaced_and_removed(storage):
    write_letter(f"{BUCKET}/mine", count=3)
    write_letter(f"{BUCKET}/mine", count=2, value=7)
    assert names(storage) == ["mine/0.npz", "mine/1.npz", "mine/letter.json"]
    assert KIND.read_header(f"{BUCKET}/mine")["count"] == 2
    assert read_values(f"{BUCKET}/mine") == {7}
    folders.remove_folder(f"{BUCKET}/mine", KIND)
    assert names(storage) == []


def _write_killed(number, value):
    write_letter(f"{BUCKET}/mine", value=value)
    os._exit(number)


@pytest.mark.parametrize("last", [".upload.part", "1.npz", "letter.json"])
def test_interrupted_upload_is_refused_and_replaced(storage, last):
    write_letter(f"{BUCKET}/mine", value=1)
    process = forked(_write_killed, 0, 2)
    uploads = []

    def kill(name):
        uploads.append(name)
        if name == f"mine/{last}":
            os.kill(process.pid, signal.SIGKILL)
            raise ConnectionAbortedError

    storage.before_upload = kill
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert f"mine/{last}" in uploads
    storage.before_upload = lambda name: None
    if last == ".upload.part":
        # The old folder is still complete.
        assert KIND.read_header(f"{BUCKET}/mine")["count"] == 3
    else:
        with pytest.raises(UserError, match="interrupted"):
            KIND.read_header(f"{BUCKET}/mine")
    write_letter(f"{BUCKET}/mine", value=3)
    assert KIND.read_header(f"{BUCKET}/mine")["count"] == 3
    assert read_values(f"{BUCKET}/mine") == {3}
    assert "mine/.upload.part" not in names(storage)
    # The next writer of that name has removed the local staging folder.
    assert not list(buckets.staging(as_path(f"{BUCKET}/mine")).parent.glob(".mine.*"))


def test_interrupted_folders_are_replaced_by_their_own_kind_only(storage):
    put(storage, "f/.upload.part", b'{"title": "a photo album"}')
    put(storage, "f/0.npz", b"...")
    with pytest.raises(UserError, match="it is not a letter"):
        write_letter(f"{BUCKET}/f")
    put(storage, "f/.upload.part", b'{"title": "a letter"}')
    write_letter(f"{BUCKET}/f")
    assert KIND.read_header(f"{BUCKET}/f")["count"] == 3


@pytest.mark.parametrize("moment", ["mine/1.npz", "mine/letter.json"])
def test_concurrent_writers_leave_no_mixture(storage, moment):
    """While one writer uploads `moment`, another one writes the complete folder."""
    writer = threading.Thread(
        target=write_letter, args=(f"{BUCKET}/mine",), kwargs={"value": 2}
    )

    def interrupt(name):
        if name == moment:
            storage.before_upload = lambda name: None
            writer.start()
            writer.join()

    storage.before_upload = interrupt
    with pytest.raises(UserError, match="another process"):
        write_letter(f"{BUCKET}/mine", value=1)
    # The folder is complete and the second writer's, or has no header.
    if "mine/letter.json" in names(storage):
        assert read_values(f"{BUCKET}/mine") == {2}
