import pytest

from bpd_jax import files
from bpd_jax.errors import UserError


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with files.replacing_file(path) as temporary:
        temporary.write_text("one")
    assert path.read_text() == "one"
    with pytest.raises(ZeroDivisionError), files.replacing_file(path) as temporary:
        temporary.write_text(str(1 / 0))
    assert path.read_text() == "one"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "f"
    for content in ("one", "two"):
        with files.replacing_folder(path) as temporary:
            (temporary / content).write_text(content)
        assert [p.name for p in path.iterdir()] == [content]
    with pytest.raises(ZeroDivisionError), files.replacing_folder(path) as temporary:
        (temporary / "half").write_text(str(1 / 0))
    assert [p.name for p in path.iterdir()] == ["two"]
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_whether_a_result_can_be_written_is_told_beforehand(tmp_path):
    (tmp_path / "file").write_text("one")
    for path, folder in [("file", False), ("", True), ("new/a", False), ("b", True)]:
        files.check_writable(tmp_path / path, folder=folder)
    for path, folder, message in [
        ("file", True, "it is a file; name a folder"),
        ("", False, "it is a folder; name a file"),
        ("file/a", False, "cannot write"),
    ]:
        with pytest.raises(UserError, match=message):
            files.check_writable(tmp_path / path, folder=folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "new"]
    assert (tmp_path / "file").read_text() == "one"
    assert not list((tmp_path / "new").iterdir())


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot write"),
        files.replacing_folder(tmp_path / "file" / "f"),
    ):
        pass


def test_a_folder_with_something_else_is_not_replaced(tmp_path):
    files.check_replaceable(tmp_path / "new", {"a"})
    assert not (tmp_path / "new").exists()
    (tmp_path / "a").touch()
    files.check_replaceable(tmp_path, {"a", "b"})
    (tmp_path / "c").touch()
    with pytest.raises(UserError, match="it holds c, which is not of an earlier"):
        files.check_replaceable(tmp_path, {"a", "b"})
