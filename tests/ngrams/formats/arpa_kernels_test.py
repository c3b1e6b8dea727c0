"""Tests of bpd_jax.ngrams.formats.arpa_kernels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.ngrams.formats import arpa_kernels


def put(value: float) -> str:
    text = np.zeros(64, np.uint8)
    end = arpa_kernels.put_number(value, text, 3)
    assert not text[:3].any()
    assert not text[end:].any()
    return text[3:end].tobytes().decode()


def parsed(text: str) -> float | None:
    data = np.frombuffer(f"x{text}y".encode(), np.uint8)
    good, value = arpa_kernels.parse_number(data, 1, data.size - 1)
    return value if good else None


@given(st.floats(-99, 10))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_numbers_are_written_to_seven_digits(value: float) -> None:
    text = put(value)
    assert float(text) == pytest.approx(value, rel=5.001e-8 * 10, abs=1e-12)
    if abs(value) >= 1e-4:
        assert text == f"{value:.7g}"
    assert parsed(text) == float(text)
    # Written once, a number does not change any more.
    assert put(float(text)) == text


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (-0.0, "0"),
        (-1e-13, "0"),
        (-99.0, "-99"),
        (-0.1, "-0.1"),
        (-0.00001234, "-0.00001234"),
        (9.99999996, "10"),
        (-434.2945, "-434.2945"),
        (1234567.0, "1234567"),
        (1e8, "100000000"),
    ],
)
def test_numbers_at_the_edges(value: float, text: str) -> None:
    assert put(value) == text


@given(st.from_regex(r"\A[+-]?[0-9]{0,9}(\.[0-9]{0,9})?([eE][+-]?[0-9]{1,2})?\Z"))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_numbers_are_read_as_python_reads_them(text: str) -> None:
    value = parsed(text)
    try:
        expected = float(text)
    except ValueError:
        assert value is None
        return
    assert value is None or value == expected


@pytest.mark.parametrize("text", ["-0.5", "+1.5", ".25", "3.", "1e5", "-2.5E-07"])
def test_usual_numbers_are_read_by_the_loop(text: str) -> None:
    assert parsed(text) == float(text)


@pytest.mark.parametrize(
    "text",
    ["", "-", ".", "e5", "1e", "1e+", "1x", "inf", "nan", "1.2.3", "--1", "1e999"],
)
def test_anything_else_is_left_to_others(text: str) -> None:
    assert parsed(text) is None
