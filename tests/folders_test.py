import os
import subprocess
import sys

import pytest

from bpd_jax import folders
from bpd_jax.errors import UserError

KIND = folders.FolderKind("a test", "marker.json", ("data_*.bin",), '"magic"')


def fill(folder, data="data_1.bin"):
    (folder / "marker.json").write_text('{"magic": 1}')
    (folder / data).write_text("data")


def write(path, data="data_1.bin"):
    with folders.replacing_folder(path, KIND) as temporary:
        fill(temporary, data)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
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
def test_a_folder_of_something_else_is_refused(tmp_path, content, reason):
    path = tmp_path / "f"
    path.mkdir()
    for name, text in content.items():
        (path / name).write_text(text)
    begun = False
    for refused in (folders.check_folder, folders.remove_folder):
        with pytest.raises(UserError, match=reason):
            refused(path, KIND)
    with pytest.raises(UserError, match=reason), folders.replacing_folder(path, KIND):
        begun = True
    assert not begun
    assert {p.name: p.read_text() for p in path.iterdir()} == content
    assert names(tmp_path) == ["f"]


def test_what_came_meanwhile_is_not_lost(tmp_path):
    path = tmp_path / "f"

    def write_and_meanwhile():
        with folders.replacing_folder(path, KIND) as temporary:
            fill(temporary)
            path.mkdir()
            (path / "notes.txt").write_text("mine")

    with pytest.raises(UserError, match=r"holds notes\.txt"):
        write_and_meanwhile()
    assert names(path) == ["notes.txt"]
    assert names(tmp_path) == ["f"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "f").mkdir()
    write(tmp_path / "f")
    assert names(tmp_path / "f") == ["data_1.bin", "marker.json"]


@pytest.mark.parametrize("made", [True, False])
def test_a_link_stays_and_its_folder_is_replaced(tmp_path, made):
    link, there = tmp_path / "link", tmp_path / "disk" / "there"
    link.symlink_to("disk/there")
    if made:
        there.mkdir(parents=True)
        fill(there, "data_0.bin")
    write(link)
    assert link.is_symlink()
    assert names(there) == ["data_1.bin", "marker.json"]
    assert names(there.parent) == ["there"]
    folders.remove_folder(link, KIND)
    assert not there.exists()


def test_a_folder_is_removed(tmp_path):
    folders.remove_folder(tmp_path / "f", KIND)
    write(tmp_path / "f")
    folders.remove_folder(tmp_path / "f", KIND)
    assert names(tmp_path) == []


@pytest.mark.parametrize("path", ["file", "file/f", "/", "/dev/null"])
def test_what_cannot_be_a_folder_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write(tmp_path / path)


def test_a_folder_between_two_names_gets_its_own_back(tmp_path):
    """As a kill exactly between the two renames leaves it."""
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
from tests import folders_test
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
