import os

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.storage import folders, paths
from bpd_jax.storage.folders import Artifact

KIND = folders.FolderKind("a test", "marker.json", ("data_*.bin",), '"magic"')
LETTER = Artifact("a thing", "thing.json", ("x.*",), remedy="make it again")


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
    folders.remove_folder(path, KIND)  # There is none.
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
        (
            {"marker.json": '{"magic": 1}', ".thesis.doc.part": "mine"},
            r"holds \.thesis\.doc\.part",
        ),
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


def test_folders_named_like_files_of_ours_are_kept(tmp_path):
    with folders.replacing_folder(tmp_path / "f", KIND) as temporary:
        (temporary / "marker.json").write_text('{"magic": 1}')
    mine = tmp_path / "f" / "data_1.bin" / "mine"
    mine.parent.mkdir()
    mine.touch()
    for function in (folders.check_folder, folders.remove_folder):
        with pytest.raises(UserError, match=r"holds the folder data_1\.bin, and"):
            function(tmp_path / "f", KIND)
    assert mine.exists()


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    folder = tmp_path / "a" / "f"
    with folders.only_writer(folder):
        with (
            pytest.raises(UserError, match="another command is writing to"),
            folders.only_writer(folder),
        ):
            pass
        assert folder.is_dir()
    assert not folder.exists()  # It is empty.
    with folders.only_writer(folder):
        (folder / "kept").touch()
    assert names(folder) == ["kept"]


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


def test_target_of_a_symlink_is_replaced(tmp_path):
    link, target = tmp_path / "link", tmp_path / "disk" / "there"
    link.symlink_to("disk/there")
    target.mkdir(parents=True)
    fill(target, "data_0.bin")
    write(link)
    assert link.is_symlink()
    assert names(target) == ["data_1.bin", "marker.json"]
    assert names(target.parent) == ["there"]
    folders.remove_folder(link, KIND)
    assert not target.exists()


@pytest.mark.parametrize("path", ["file", "file/f", "/", "/dev/null"])
def test_invalid_folders_are_refused(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write(tmp_path / path)


def test_remainders_of_killed_processes_do_not_make_a_folder_foreign(tmp_path):
    write(tmp_path / "f")
    with paths.part(tmp_path / "f" / "half") as half:
        half.rename(half.with_name(half.name.replace("half", "left")))
        left = half.name.replace("half", "left")
    assert left in names(tmp_path / "f")
    write(tmp_path / "f")
    assert names(tmp_path / "f") == ["data_1.bin", "marker.json"]


def test_the_only_copy_of_a_folder_is_not_a_remainder(tmp_path, monkeypatch):
    """Between two renames it has a name that `make clean` leaves."""
    write(tmp_path / "f")
    rename, calls = os.rename, []

    def interrupted(old, new):
        calls.append(names(tmp_path))
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(old, new)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "f", "data_2.bin")
    [older] = [name for name in calls[1] if not name.endswith(".part")]
    assert older.startswith(".bpd_jax-f.")
    assert paths.is_temporary(older)
    assert names(tmp_path) == ["f"]
    assert names(tmp_path / "f") == ["data_1.bin", "marker.json"]


def test_headers_round_trip(tmp_path):
    for size in (1, 2):
        with folders.replacing_folder(tmp_path / "thing", LETTER) as temporary:
            LETTER.write_header(temporary, {"size": size})
    header = {"artifact": "a thing", "version": 1, "size": 2}
    assert LETTER.read_header(tmp_path / "thing", {"size": int}) == header
    assert names(tmp_path / "thing") == ["thing.json"]


@pytest.mark.parametrize(
    "header, message",
    [
        ("{", "Expecting"),
        ("[]", "thing.json"),
        ('{"format": 2, "size": 1}', "not of format 1"),
        ('{"artifact": "another thing", "version": 1, "size": 1}', "header of a thing"),
        ('{"format": 1}', "size"),
        ('{"format": 1, "size": NaN}', "NaN"),
    ],
)
def test_a_damaged_header_is_reported_with_the_remedy(tmp_path, header, message):
    (tmp_path / "thing.json").write_text(header)
    with pytest.raises(UserError, match=message) as caught:
        LETTER.read_header(tmp_path, {"size": int})
    assert str(caught.value).endswith("make it again.")


def test_a_missing_header_is_reported_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "nowhere", tmp_path / "file", tmp_path):
        with pytest.raises(UserError, match=r"not hold a thing: .*; make it again"):
            LETTER.read_header(folder)
