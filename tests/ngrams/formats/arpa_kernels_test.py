import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.ngrams.formats import arpa_kernels
from bpd_jax.ngrams.formats.arpa import format_numbers


def formatted(value):
    letters, begins = format_numbers(np.array([value]))
    assert begins.tolist() == [0, letters.size]
    return letters.tobytes().decode()


def parsed(text):
    data = np.frombuffer(f"x{text}y".encode(), np.uint8)
    good, value = arpa_kernels.parse_number(data, 1, data.size - 1)
    return value if good else None


@given(st.floats(-99, 10))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_numbers_are_written_to_seven_digits(value):
    text = formatted(value)
    assert float(text) == pytest.approx(value, rel=5.001e-7, abs=1e-12)
    assert parsed(text) == float(text)
    # Formatting is idempotent.
    assert formatted(float(text)) == text


# A strategy from one regular expression takes twenty times as long.
SIGN, DIGITS = st.sampled_from(["", "+", "-"]), st.text("0123456789", max_size=9)
FRACTION = st.just("") | DIGITS.map(".{}".format)
EXPONENT = st.just("") | st.builds("e{}{}".format, SIGN, st.integers(0, 99))


@given(st.tuples(SIGN, DIGITS, FRACTION, EXPONENT).map("".join))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_parsed_numbers_equal_pythons(text):
    value = parsed(text)
    try:
        expected = float(text)
    except ValueError:
        assert value is None
        return
    assert value is None or value == expected


@pytest.mark.parametrize(
    "text",
    ["", "-", ".", "e5", "1e", "1e+", "1x", "inf", "nan", "1.2.3", "--1", "1e999"],
)
def test_other_texts_are_left_to_python(text):
    assert parsed(text) is None
