"""Tests of the text of bytes, counts and seconds, also where rounding reaches the next unit."""

import pytest

from offload_trainer.units import format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (1000, "1 kB"),
        (12_345_678, "12.3 MB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (999_999_999_999, "1 TB"),
        (2 * 10**15, "2 PB"),
        (-1_500, "-1.5 kB"),
    ],
)
def test_bytes(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (1.234, "1.23"), (124_439_808, "124 M"), (10_280_000_000, "10.3 G")]
)
def test_counts(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.25, "0.25 s"),
        (9.96, "10 s"),
        (12.4, "12 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (5 * 3600 + 7 * 60 + 59, "5 h 07 min"),
        (86399.9, "1 d 00 h"),
        (2 * 86400 + 3 * 3600, "2 d 03 h"),
    ],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 500 * 10**6),
        ("1.5 kB", 1500),
        ("2GiB", 2 << 30),
        ("77", 77),
        ("12B", 12),
        ("much", 0),
        ("", 0),
        ("-3GB", 0),
        ("5XB", 0),
    ],
)
def test_sizes_that_users_write(text, number):
    assert parse_bytes(text) == number
