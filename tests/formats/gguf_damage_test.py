"""Damaged files are reported in one sentence, quickly and with little memory."""

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.formats.gguf_file import GGUFFile
from bpd_jax.formats.gguf_model import open_gguf


@pytest.fixture(scope="module")
def intact(tiny, tmp_path_factory):
    """The bytes of a file, and the number of bytes of its header."""
    path = tmp_path_factory.mktemp("intact") / "m.gguf"
    tiny.make("llama", num_layers=1).write(path)
    file = GGUFFile(path)
    return path.read_bytes(), min(t.data_offset for t in file.tensors.values())


@pytest.fixture(scope="module")
def can_be_opened(tmp_path_factory):
    """A function that tells whether a file can be opened; checks the error message."""
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"

    def opened(data):
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        try:
            open_gguf(path)
        except UserError as error:
            message = str(error)
        else:
            return True
        assert "\n" not in message
        assert len(message) < 2000
        return False

    return opened


def peak_memory(call, *arguments):
    tracemalloc.start()
    try:
        call(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_every_truncation_is_refused(intact, can_be_opened):
    data, header = intact
    assert can_be_opened(data)
    # The last bytes of the file are padding.
    for length in [*range(0, header, 7), *range(header, len(data) - 32, 997)]:
        assert not can_be_opened(data[:length]), length


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.data())
def test_changed_bytes_are_read_or_refused(intact, can_be_opened, draws):
    data, header = bytearray(intact[0]), intact[1]
    for _ in range(draws.draw(st.integers(1, 4))):
        data[draws.draw(st.integers(0, header - 1))] = draws.draw(st.integers(0, 255))
    can_be_opened(bytes(data))


def test_huge_counts_allocate_no_memory(intact, can_be_opened):
    data, header = intact
    for number, start in enumerate(range(8, header - 8, 13)):
        value = (2**40, 2**64 - 1)[number % 2]
        changed = data[:start] + value.to_bytes(8, "little") + data[start + 8 :]
        assert peak_memory(can_be_opened, changed) < 1 << 20, start


def header(values=(), tensors=(), counts=None, tail=b"\0" * 256):
    """A file of values (key, type, bytes) and tensors (name, dims, type, offset)."""

    def string(text):
        return struct.pack("<Q", len(text)) + text

    num_tensors, num_values = counts or (len(tensors), len(values))
    parts = [b"GGUF", struct.pack("<IQQ", 3, num_tensors, num_values)]
    for key, kind, value in values:
        parts += [string(key), struct.pack("<I", kind), value]
    for name, dimensions, kind, offset in tensors:
        parts += [string(name), struct.pack("<I", len(dimensions))]
        parts += [struct.pack("<Q", size) for size in dimensions]
        parts += [struct.pack("<IQ", kind, offset)]
    data = b"".join(parts)
    return data + b"\0" * (-len(data) % 32) + tail


NUMBER = (b"n", 4, struct.pack("<I", 5))
A, B = (b"a", (8,), 0, 0), (b"b", (8,), 0, 32)
DAMAGED = {
    "magic": (b"GGUf" + header()[4:], "not a GGUF file"),
    "type": (header([(b"n", 13, b"")]), "not a valid GGUFValueType"),
    "nested": (header([(b"n", 9, struct.pack("<IQ", 9, 1))]), "of type ARRAY"),
    "quantisation": (
        header(tensors=[(b"a", (8,), 77, 0)]),
        "GGMLQuantizationType",
    ),
    "blocks": (header(tensors=[(b"a", (24,), 8, 0)]), "not a multiple of Q8_0"),
    "misplaced": (header(tensors=[(b"a", (8,), 0, 8)]), "'a' is not aligned"),
    "overlap": (header(tensors=[(b"a", (9,), 0, 0), B]), "'a' and 'b' overlap"),
}


@pytest.mark.parametrize("data, reason", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused(tmp_path, data, reason):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=reason) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_tensors_may_be_adjacent_and_in_any_order(tmp_path):
    path = tmp_path / "m.gguf"
    numbers = np.arange(16, dtype="<f4")
    path.write_bytes(header([NUMBER], [B, A], tail=numbers.tobytes()))
    file = GGUFFile(path)
    assert file.find("n", int) == 5
    assert file.read("a").tolist() == list(range(8))
    assert file.read("b").tolist() == list(range(8, 16))
