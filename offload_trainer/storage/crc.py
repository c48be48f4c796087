"""CRC-32 of bytes end to end, from the CRC-32 of each part: what zlib's C library has and Python's does not.

A CRC is a polynomial over GF(2) modulo x^32 + x^26 + ... + 1. Bytes that follow multiply what was before them by
x^(8 * their number), which is a product of the squares x^(2^k) (M. Adler, zlib's crc32.c, crc32_combine, 2020).
"""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0xEDB88320  # bit 31 is x^0, bit 0 is x^31, as in the CRC itself
_ONE = 1 << 31


def combined(first: int, second: int, length: int) -> int:
    """CRC-32 of A and B end to end, from those of A and of B, which has `length` bytes."""
    return _product(_power(8 * length), first) ^ second


def _product(one: int, other: int) -> int:
    """Of two polynomials, modulo the CRC's."""
    result, bit = 0, _ONE
    while bit:
        if one & bit:
            result ^= other
        bit >>= 1
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return result


@cache
def _square(number: int) -> int:
    """x^(2^number)."""
    return _product(_square(number - 1), _square(number - 1)) if number else _ONE >> 1


def _power(exponent: int) -> int:
    """x^exponent."""
    result, number = _ONE, 0
    while exponent >> number:
        if exponent >> number & 1:
            result = _product(_square(number), result)
        number += 1
    return result
