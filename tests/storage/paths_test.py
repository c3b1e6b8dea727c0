"""Paths under gs://, against a storage server in this process."""

import os
import pathlib
import re
import sys
from concurrent import futures

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import open_npy, read_npz
from bpd_jax.storage import files, folders, paths
from bpd_jax.storage.paths import as_path

BUCKET = "gs://bpd-test"
KIND = folders.Artifact("a letter", "letter.json", ("*.npz",), remedy="write it anew")


@pytest.fixture(autouse=True)
def empty_bucket(request):
    if "storage" in request.fixturenames:
        request.getfixturevalue("storage").clear()


def put(storage, name, data):
    return storage.put("bpd-test", name, data)


def names(storage):
    return sorted(storage.objects["bpd-test"])


def write_letter(folder, count=3, value=1):
    with folders.replacing_folder(folder, KIND) as temporary:
        for number in range(count):
            np.savez(temporary / f"{number}.npz", x=np.full(4, value))
        KIND.write_header(temporary, {"count": count})


def test_only_names_under_gs_are_in_a_bucket(tmp_path):
    assert type(as_path(str(tmp_path))) is type(tmp_path)
    path = as_path("gs://b/a") / "c.txt"
    assert paths.in_bucket(path)
    assert not paths.in_bucket("gs/b")
    assert str(path) == f"{path}" == "gs://b/a/c.txt"
    assert str(path.with_suffix(".gz").parent) == "gs://b/a"
    assert path.absolute() == path == as_path(pathlib.Path("gs://b/a/c.txt"))
    for bad in ("gs://", "gs://b/../c"):
        with pytest.raises(UserError, match="gs://bucket"):
            as_path(bad)
    for url in ("s3://b/a", "file:///etc", "hdfs://h/a"):
        with pytest.raises(UserError, match="not supported"):
            as_path(url)
    assert as_path("a:b/c") == pathlib.Path("a:b/c")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert as_path("~/a") == as_path(pathlib.Path("~/a")) == tmp_path / "a"
    assert as_path("b~/~") == pathlib.Path("b~/~")
    monkeypatch.delenv("HOME")
    # Without a name of the user, too.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(UserError, match=r"~/a: there is no home folder .* HOME"):
        as_path("~/a")


@pytest.mark.parametrize(
    "pattern, names",
    [
        ("[v1] a*b?/x\\.txt", ["x\\.txt"]),
        ("[v1] a*b?/*.txt", ["[1].txt", "x\\.txt"]),
        ("[v1] a*b?/[1].txt", ["[1].txt"]),
        ("**/*.txt", ["[v1] a*b?/[1].txt", "[v1] a*b?/x\\.txt"]),
        ("[[]v*/[[]1].txt", ["[v1] a*b?/[1].txt"]),
    ],
)
def test_what_exists_is_no_pattern(pattern, names, tmp_path):
    (tmp_path / "[v1] a*b?").mkdir()
    for name in ("[1].txt", "x\\.txt"):
        (tmp_path / "[v1] a*b?" / name).touch()
    root, found = paths.matching(str(tmp_path / pattern), "files")
    assert [str(path.relative_to(root)) for path in found] == names
    folder = str(tmp_path / "[v1] a*b?")
    with pytest.raises(UserError, match=re.escape(f"{folder!r} is a folder")):
        paths.matching(folder, "files")
    with pytest.raises(UserError, match="matches no file"):
        paths.matching(str(tmp_path / "[v2]/*.txt"), "files")


def test_libraries_that_take_names_for_patterns_get_none():
    for folder in ("a[1]", "b*/c", "d\\e", "f?"):
        with pytest.raises(UserError, match=r"Beam would take .* for a pattern"):
            paths.check_plain(folder, "Beam")
    paths.check_plain("a {1} #2", "Beam")


def test_a_pipe_is_refused_where_a_file_is_needed(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    for read in (paths.local_copy, lambda path: paths.matching(str(path), "tokens")):
        with pytest.raises(UserError, match="is a pipe or a device"):
            read(pipe)


def test_missing_package_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match=r"bpd_jax\[gcs\]"):
        as_path("gs://b/a").exists()


def test_paths_in_a_bucket_behave_like_local_paths(storage):
    for name in ("a/b.txt", "a/c/d.txt", "a/c/e.md", "ab.txt"):
        put(storage, name, name.encode())
    top = as_path(BUCKET) / "a"
    assert (top.is_dir(), top.is_file()) == (True, False)
    file = top / "b.txt"
    assert (file.is_dir(), file.is_file()) == (False, True)
    assert not (top / "b").exists()
    assert [path.name for path in top.iterdir()] == ["b.txt", "c"]
    assert list(top.glob("*/*.txt")) == [top / "c" / "d.txt"]
    assert {path.name for path in top.rglob("*.txt")} == {"b.txt", "d.txt"}
    assert (top / "c" / "d.txt").stat().st_size == 9
    assert file.read_text() == "a/b.txt"
    with pytest.raises(FileNotFoundError):
        (top / "b").read_bytes()
    with pytest.raises(FileNotFoundError):
        list((top / "x").iterdir())
    with pytest.raises(IsADirectoryError):
        top.read_bytes()
    with pytest.raises(OSError, match="in place"):
        file.open("a")
    file.unlink()
    assert not file.exists()
    with pytest.raises(FileNotFoundError):
        file.unlink()


def test_local_copies_are_reused_until_the_object_changes(storage, tmp_path):
    path = as_path(f"{BUCKET}/x.npy")
    maps = []
    for value in (1, 2):
        np.save(tmp_path / "x.npy", np.full(3, value))
        put(storage, "x.npy", (tmp_path / "x.npy").read_bytes())
        maps += [open_npy(paths.local_copy(path)) for _ in range(2)]
    # Open maps keep the old content.
    assert [array[0] for array in maps] == [1, 1, 2, 2]
    assert storage.downloads() == ["x.npy"] * 2
    assert len(list(paths.local_copy(path).parent.parent.glob("*/x.npy"))) == 1


def test_incomplete_downloads_are_refused(storage):
    put(storage, "m/letter.json", b'{"format": 1}').reported = 14
    with pytest.raises(UserError, match=r"13 of 14 bytes.*write it anew"):
        KIND.read_header(f"{BUCKET}/m")


def test_files_are_replaced_when_the_upload_is_complete(storage):
    path = f"{BUCKET}/a/text.txt"
    files.check_writable(path)
    with files.replacing_file(path) as temporary:
        temporary.write_text("one\r\ntwo")
        assert names(storage) == []
    with pytest.raises(ZeroDivisionError), files.replacing_file(path) as temporary:
        temporary.write_text(str(1 / 0))
    assert storage.objects["bpd-test"]["a/text.txt"].data == b"one\r\ntwo"
    large = os.urandom(9 << 20)  # In several requests.
    with files.replacing_file(path) as temporary:
        temporary.write_bytes(large)
    assert as_path(path).read_bytes() == large
    assert not list(paths.work_place(as_path(path)).parent.iterdir())


def test_missing_bucket_is_reported_before_writing(storage):
    for check in (files.check_writable, lambda path: folders.check_folder(path, KIND)):
        with pytest.raises(UserError, match=r"cannot write gs://no-such-bucket/x.*not"):
            check("gs://no-such-bucket/x")


def test_processes_of_a_run_check_the_same_file_at_once(storage):
    with futures.ThreadPoolExecutor(8) as pool:
        [*pool.map(files.check_writable, [f"{BUCKET}/a/text.txt"] * 8)]


def test_folders_of_another_kind_are_unchanged(storage):
    put(storage, "theirs/photo.jpg", b"...")
    for write in (write_letter, lambda path: folders.remove_folder(path, KIND)):
        with pytest.raises(UserError, match=r"photo\.jpg"):
            write(f"{BUCKET}/theirs")
    with pytest.raises(UserError, match="is a folder"):
        files.check_writable(f"{BUCKET}/theirs")
    assert names(storage) == ["theirs/photo.jpg"]


def test_a_folder_is_replaced_and_removed(storage):
    write_letter(f"{BUCKET}/mine", count=3)
    write_letter(f"{BUCKET}/mine", count=2, value=7)
    assert names(storage) == ["mine/0.npz", "mine/1.npz", "mine/letter.json"]
    assert KIND.read_header(f"{BUCKET}/mine")["count"] == 2
    arrays = [
        read_npz(paths.local_copy(path))
        for path in as_path(f"{BUCKET}/mine").glob("*.npz")
    ]
    assert [a["x"].tolist() for a in arrays] == [[7] * 4] * 2
    folders.remove_folder(f"{BUCKET}/mine", KIND)
    assert names(storage) == []


def test_an_interrupted_upload_is_refused(storage, monkeypatch):
    write_letter(f"{BUCKET}/mine")

    def interrupt(*_):
        raise OSError("the network is gone")

    monkeypatch.setattr(paths, "upload", interrupt)
    with pytest.raises(UserError, match=r"cannot write .*network is gone"):
        write_letter(f"{BUCKET}/mine", value=2)
    with pytest.raises(UserError, match=r"letter\.json is missing"):
        KIND.read_header(f"{BUCKET}/mine")
