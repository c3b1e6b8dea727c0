import os
import subprocess
import sys

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.storage import folders

KIND = folders.FolderKind("a test", "marker.json", ("data_*.bin",), '"magic"')


def fill(folder, data="data_1.bin"):
    (folder / "marker.json").write_text('{"magic": 1}')
    (folder / data).write_text("data")


def write(path, data="data_1.bin"):
    with folders.replacing_folder(path, KIND) as temporary:
        fill(temporary, data)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_folders_are_replaced_atomically(tmp_path):
    path = tmp_path / "new" / "f"
    for data in ("data_1.bin", "data_2.bin"):
        write(path, data)
        assert names(path) == [data, "marker.json"]
    with (
        pytest.raises(ZeroDivisionError),
        folders.replacing_folder(path, KIND) as temporary,
    ):
        (temporary / "half").write_text(str(1 / 0))
    assert names(path) == ["data_2.bin", "marker.json"]
    assert names(path.parent) == ["f"]


@pytest.mark.parametrize(
    "content, reason",
    [
        ({"notes.txt": "mine"}, "holds notes.txt"),
        ({"marker.json": '{"magic": 1}', "notes.txt": "mine"}, "holds notes.txt"),
        ({"marker.json": '{"magic": 1}', ".hidden": "mine"}, "holds .hidden"),
        ({"marker.json": "{}", "data_1.bin": "mine"}, "is not that of a test"),
        ({"data_1.bin": "mine"}, "has no file marker.json"),
    ],
)
def test_folders_of_another_kind_are_refused(tmp_path, content, reason):
    path = tmp_path / "f"
    path.mkdir()
    for name, text in content.items():
        (path / name).write_text(text)
    begun = False
    for function in (folders.check_folder, folders.remove_folder):
        with pytest.raises(UserError, match=reason):
            function(path, KIND)
    with pytest.raises(UserError, match=reason), folders.replacing_folder(path, KIND):
        begun = True
    assert not begun
    assert {p.name: p.read_text() for p in path.iterdir()} == content
    assert names(tmp_path) == ["f"]


def test_folder_made_during_the_write_is_kept(tmp_path):
    path = tmp_path / "f"

    def write_with_conflict():
        with folders.replacing_folder(path, KIND) as temporary:
            fill(temporary)
            path.mkdir()
            (path / "notes.txt").write_text("mine")

    with pytest.raises(UserError, match=r"holds notes\.txt"):
        write_with_conflict()
    assert names(path) == ["notes.txt"]
    assert names(tmp_path) == ["f"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "f").mkdir()
    write(tmp_path / "f")
    assert names(tmp_path / "f") == ["data_1.bin", "marker.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_target_of_a_symlink_is_replaced(tmp_path, exists):
    link, target = tmp_path / "link", tmp_path / "disk" / "there"
    link.symlink_to("disk/there")
    if exists:
        target.mkdir(parents=True)
        fill(target, "data_0.bin")
    write(link)
    assert link.is_symlink()
    assert names(target) == ["data_1.bin", "marker.json"]
    assert names(target.parent) == ["there"]
    folders.remove_folder(link, KIND)
    assert not target.exists()


def test_a_folder_is_removed(tmp_path):
    folders.remove_folder(tmp_path / "f", KIND)
    write(tmp_path / "f")
    folders.remove_folder(tmp_path / "f", KIND)
    assert names(tmp_path) == []


@pytest.mark.parametrize("path", ["file", "file/f", "/", "/dev/null"])
def test_invalid_folders_are_refused(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write(tmp_path / path)


def test_interrupted_replacement_is_restored(tmp_path):
    """The state after a kill between the two renames of a replacement."""
    write(tmp_path / "f")
    with folders.replacing_folder(tmp_path / "g", KIND) as temporary:
        name = temporary.name
    old = tmp_path / name.replace(".g.", ".f.").replace(".part", ".old")
    (tmp_path / "f").rename(old)
    with (
        pytest.raises(ZeroDivisionError),
        folders.replacing_folder(tmp_path / "f", KIND),
    ):
        1 / 0  # noqa: B018
    assert names(tmp_path / "f") == ["data_1.bin", "marker.json"]


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from tests.storage import folders_test
for _ in range(50):
    folders_test.write(folders_test.folders.files.resolved(sys.argv[1]))
"""


def test_several_processes_write_one_folder(tmp_path):
    path = tmp_path / "f"
    command = [sys.executable, "-c", WRITER, os.fspath(path), os.getcwd()]
    children = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for child in children:
        assert child.communicate()[1] == ""
        assert child.returncode == 0
    assert names(path) == ["data_1.bin", "marker.json"]
    assert names(tmp_path) == ["f"]
