"""CRC-32 of a concatenation, computed from the CRC-32 of each part; Python's zlib does not expose crc32_combine.

A CRC is a polynomial over GF(2) modulo x^32 + x^26 + ... + 1. Appending n bytes multiplies the CRC of what precedes
them by x^(8 * n), which is a product of the squares x^(2^k) (M. Adler, zlib's crc32.c, crc32_combine, 2020).
"""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0xEDB88320  # bit 31 is x^0, bit 0 is x^31, as in the CRC itself
_ONE = 1 << 31


def combined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of A followed by B, given the CRC-32 of each and the length of B in bytes."""
    return _product(_power(8 * length), first) ^ second


def _product(one: int, other: int) -> int:
    """Multiply two polynomials modulo the CRC's polynomial."""
    result, bit = 0, _ONE
    while bit:
        if one & bit:
            result ^= other
        bit >>= 1
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return result


@cache
def _square(number: int) -> int:
    """Return x^(2^number)."""
    return _product(_square(number - 1), _square(number - 1)) if number else _ONE >> 1


def _power(exponent: int) -> int:
    """Return x^exponent."""
    result, number = _ONE, 0
    while exponent >> number:
        if exponent >> number & 1:
            result = _product(_square(number), result)
        number += 1
    return result
