"""Tests of the text of bytes, counts and seconds, also where rounding reaches the next unit."""

from offload_trainer.common.units import format_bytes, format_count, format_seconds


def test_numbers_have_the_unit_that_rounding_leaves() -> None:
    for number, text in {0: "0 B", 999.6: "1 kB", 12_345_678: "12.3 MB", 999_500: "1 MB", -1500: "-1.5 kB"}.items():
        assert format_bytes(number) == text
    assert format_count(10_280_000_000) == "10.3 G"
    for seconds, text in {0.25: "0.25 s", 9.96: "10 s", 59.6: "1 min 00 s", 3599.7: "1 h 00 min"}.items():
        assert format_seconds(seconds) == text
    assert format_seconds(2 * 86400 + 3 * 3600) == "2 d 03 h"
