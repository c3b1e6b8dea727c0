"""JSON, lines and arrays in files that may be damaged."""

import gzip
import sys
import zipfile

import numpy as np
import pytest

from bpd_jax.base import reading
from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import ArraySpec, open_npy, read_npz
from bpd_jax.data import text_readers
from bpd_jax.data.text_readers import read_prompts_file


def test_integers_beyond_float64_are_refused():
    largest = int(sys.float_info.max)
    assert reading.parse_json(f"[{10**307}, -{2**70}]") == [10**307, -(2**70)]
    assert reading.parse_json(b"\xef\xbb\xbf[1]") == [1]  # A byte order mark.
    for number in (10 * largest, -10 * largest):
        with pytest.raises(ValueError, match="beyond the range"):
            reading.parse_json(f'{{"a": {number}}}')


def test_length_of_a_line_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_LINE", 10)
    path = tmp_path / "lines.gz"
    with gzip.open(path, "wb") as stream:
        stream.write(b"123456789\n" * 3 + b"1234567890\n")
    lines = text_readers.read_lines(path)
    assert [next(lines)[0] for _ in range(3)] == [1, 2, 3]
    with pytest.raises(UserError, match="line 4, has more than 10 bytes"):
        next(lines)


def test_total_size_of_kept_lines_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_KEPT", 10 * (reading.LINE_COST + 2))
    for name, line in {"a.txt.gz": b"a\n", "a.jsonl.gz": b'{"prompt": "a"}\n'}.items():
        path = tmp_path / name
        path.write_bytes(gzip.compress(line * 11))
        with pytest.raises(UserError, match="too large to be kept in memory"):
            read_prompts_file(path)
        # A file that is read line by line may have any number of lines.
        assert len(list(text_readers.read_lines(path))) == 11
    (tmp_path / "few.txt").write_bytes(b"a\n" * 10)
    assert read_prompts_file(tmp_path / "few.txt") == ["a"] * 10


INTS = ArraySpec(("<i8",), (None,), 0, 9)
FLOATS = ArraySpec(("<f8",), (2, None))


@pytest.mark.parametrize(
    "spec, values, reason",
    [
        (INTS, np.array([3, 10]), "above 9"),
        (INTS, np.array([-1, 3]), "below 0"),
        (INTS, np.array([3], np.int32), "int32"),
        (FLOATS, np.zeros((3, 1)), "shape"),
        (FLOATS, np.array([[np.nan], [0]]), "NaN"),
        (FLOATS, np.array([[np.inf], [0]]), "infinite"),
        (ArraySpec(("<f8",), (1,), finite=False), np.array([np.nan]), "NaN"),
        (ArraySpec(("<i8",), (None,), increasing=True), np.array([1, 1]), "increase"),
    ],
)
def test_invalid_arrays_are_refused(spec, values, reason):
    with pytest.raises(ValueError, match=reason):
        spec.check(values)


@pytest.mark.parametrize("index", [1, 1 << 20])
def test_order_is_compared_across_blocks(index):
    values = np.arange(3_000_000)
    values[index] = values[index - 1]
    with pytest.raises(ValueError, match="increase"):
        ArraySpec(("<i8",), (None,), increasing=True).check(values)


def save(path):
    np.savez(path, ints=np.arange(9), floats=np.ones((2, 3)), key=np.str_("abc"))


def test_missing_and_unknown_names_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.array([1]), c=np.array([1]))
    with pytest.raises(ValueError, match="'b' is missing"):
        read_npz(path, {"a": INTS, "b": INTS, "c": INTS})
    with pytest.raises(ValueError, match="'c' is unknown"):
        read_npz(path, {"a": INTS})
    arrays = read_npz(path, dict.fromkeys("abc", INTS), optional=("b",))
    assert list(arrays) == ["a", "c"]


def test_flipped_bits_and_truncation_are_detected(tmp_path):
    """Except in unused bits of the archive, which leave the arrays unchanged."""
    path = tmp_path / "a.npz"
    save(path)
    intact, expected = path.read_bytes(), read_npz(path)
    detected = 0
    for offset in range(0, len(intact), 3):
        for data in (
            intact[:offset],
            intact[:offset]
            + bytes([intact[offset] ^ 1 << offset % 8])
            + intact[offset + 1 :],
        ):
            path.write_bytes(data)
            try:
                arrays = read_npz(path)
            except (OSError, ValueError):
                detected += 1
            else:
                for name in arrays.keys() & expected.keys():
                    np.testing.assert_array_equal(arrays[name], expected[name])
    assert detected > len(intact) // 3


def test_allocation_is_limited_by_the_file_size(tmp_path):
    path = tmp_path / "a.npz"
    header = str({"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("huge.npy", data)
    with pytest.raises(ValueError, match="allocate"):
        read_npz(path)
    # Zeros, of which a small file would hold very many.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("huge.npy", bytes(10_000_000))
    assert path.stat().st_size < 20_000
    with pytest.raises(ValueError, match="compressed"):
        read_npz(path)


def test_python_objects_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}]))
    with pytest.raises(ValueError, match=r"[Oo]bject"):
        open_npy(tmp_path / "a.npy")
    np.savez(tmp_path / "a.npz", a=np.array([{}]))
    with pytest.raises(ValueError, match="Object"):
        read_npz(tmp_path / "a.npz")
