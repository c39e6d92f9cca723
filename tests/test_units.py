"""Bytes and counts to and from text. Run: pytest tests/test_units.py."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcore.errors import UserError
from memcore.units import (
    GB,
    GIB,
    MAX_PARAMS,
    MIB,
    ByteUnit,
    ceil_div,
    format_bytes,
    format_count,
    format_precisely,
    format_rate,
    format_seconds,
    parse_count,
    round_up,
)


def test_gb_and_gib_differ():
    assert (GB, GIB, MIB) == (1_000_000_000, 1_073_741_824, 1_048_576)
    assert (ByteUnit.GB.size, ByteUnit.GIB.size) == (GB, GIB)


@pytest.mark.parametrize(
    ("num_bytes", "unit", "text"),
    [
        (38_500_000_000, ByteUnit.GB, "38.5 GB"),
        (26_250_000_000, ByteUnit.GB, "26.25 GB"),
        (112 * GB, ByteUnit.GB, "112 GB"),
        (1024 * GB, ByteUnit.GB, "1,024 GB"),
        (80 * GIB, ByteUnit.GIB, "80 GiB"),
        (80 * GIB, ByteUnit.GB, "85.9 GB"),
        (38_500_000_000, ByteUnit.GIB, "35.86 GiB"),
        (33_554_432, ByteUnit.GIB, "32 MiB"),
        (33_554_432, ByteUnit.GB, "33.55 MB"),
        (8_519_680, ByteUnit.GB, "8.52 MB"),
        (2048, ByteUnit.GIB, "2 KiB"),
        (12, ByteUnit.GB, "12 B"),
        (12, ByteUnit.GIB, "12 B"),
        (0, ByteUnit.GB, "0 B"),
        (-2 * GB, ByteUnit.GB, "-2 GB"),
        (100_000_000, ByteUnit.GB, "0.1 GB"),
        (1_000_000, ByteUnit.GB, "1 MB"),
    ],
)
def test_bytes_as_text(num_bytes: int, unit: ByteUnit, text: str):
    assert format_bytes(num_bytes, unit) == text


def test_bytes_with_fixed_digits():
    assert format_bytes(38_500_000_000, ByteUnit.GB, digits=1) == "38.5 GB"
    assert format_bytes(38_500_000_000, ByteUnit.GIB, digits=3) == "35.856 GiB"


@given(st.integers(0, 10**18), st.sampled_from(list(ByteUnit)))
def test_the_label_fits_the_number(num_bytes: int, unit: ByteUnit):
    number, label = format_bytes(num_bytes, unit).split(" ")
    step = 1000 if unit is ByteUnit.GB else 1024
    labels = ("B", "KB", "MB", "GB") if unit is ByteUnit.GB else ("B", "KiB", "MiB", "GiB")
    shown = float(number.replace(",", "")) * step ** labels.index(label)
    assert math.isclose(shown, num_bytes, rel_tol=0.05, abs_tol=0.5)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (8_030_261_248, "8.03 B"),
        (124_439_808, "124.4 M"),
        (10**12, "1 T"),
        (175 * 10**9, "175 B"),
        (4_096, "4.096 K"),
        (7, "7"),
        (10**15, "1000 T"),
    ],
)
def test_counts_as_text(count: int, text: str):
    assert format_count(count) == text


@pytest.mark.parametrize("count", [999_950_000, 999_999_999, 999_999, 999_999_999_999])
def test_counts_just_below_the_next_label_are_not_in_powers_of_ten(count: int):
    assert "e" not in format_count(count)


@given(st.integers(1, MAX_PARAMS))
def test_a_count_in_digits_is_read_exactly(count: int):
    assert parse_count(str(count)) == parse_count(f"{count:,}") == parse_count(f"{count:_}") == count


@given(st.integers(1, MAX_PARAMS))
def test_a_shown_count_is_read_back_to_four_digits(count: int):
    assert parse_count(format_count(count)) == pytest.approx(count, rel=5.1e-4)


@given(st.text(max_size=30))
def test_any_text_is_a_count_or_refused(text: str):
    try:
        count = parse_count(text)
    except UserError as error:
        sentence = str(error)
    else:
        assert 1 <= count <= MAX_PARAMS
        assert any(digit in text for digit in "123456789")
        return
    assert sentence.endswith(".")


@pytest.mark.parametrize("text", ["1,2,3", "7 8", "6'738'415'616", "1 000 000", "7_000"])
def test_separators_are_dropped(text: str):
    assert parse_count(text) == int("".join(character for character in text if character.isdigit()))


def test_rates_and_durations():
    assert format_rate(450e9) == "450 GB/s"
    assert format_rate(31_500_000_000) == "31.5 GB/s"
    assert format_seconds(1.25) == "1.25 s"
    assert format_seconds(0.0125) == "12.5 ms"
    assert format_seconds(3e-5) == "30 µs"
    assert format_seconds(0) == "0 µs"


@given(st.integers(0, 10**30), st.integers(1, 10**15))
def test_ceil_div_is_exact(numerator: int, denominator: int):
    quotient = ceil_div(numerator, denominator)
    assert (quotient - 1) * denominator < numerator <= quotient * denominator
    assert round_up(numerator, denominator) == quotient * denominator


@pytest.mark.parametrize(
    ("num_bytes", "unit", "text"),
    [
        (102_301_234, ByteUnit.GB, "102.301 MB"),
        (2_000_500_000, ByteUnit.GB, "2.001 GB"),
        (2**20, ByteUnit.GIB, "1.000 MiB"),
        (3 * 2**30, ByteUnit.GIB, "3.000 GiB"),
        (0, ByteUnit.GB, "0.000 MB"),
    ],
)
def test_a_precise_text_keeps_parts_of_a_percent_apart(num_bytes: int, unit: ByteUnit, text: str):
    assert format_precisely(num_bytes, unit) == text
