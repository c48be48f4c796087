"""Bytes, seconds and counts as text. Inside the program they are plain numbers; only the edge uses these.

Sizes are decimal throughout (1 GB = 10**9 bytes), as drives and bandwidths are sold.
"""

import re

_STEPS = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def _scaled(number: float, suffix: str) -> str:
    number = float(f"{number:.3g}")  # rounded before the letter is chosen: 999,999 is 1 M, not 1e+03 k
    for step, letter in _STEPS:
        if abs(number) >= step:
            return f"{number / step:.3g} {letter}{suffix}".rstrip()
    return f"{number:.3g} {suffix}".rstrip()


def format_bytes(number: float) -> str:
    """``format_bytes(12_345_678) == '12.3 MB'``."""
    return _scaled(number, "B")


def shown(text: object) -> str:
    """Text for a terminal, which may hold names and texts of others' files: what is not printable is escaped.

    Line ends stay. Bytes of names that are no UTF-8, which Python keeps as lone surrogates, are escaped too.
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in str(text)
    )


def is_utf8(text: str) -> bool:
    """Whether it can be written; names of files whose bytes are no UTF-8 cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def parse_bytes(text: str) -> int:
    """``parse_bytes('500MB') == 500_000_000``; decimal, or binary with an i (MiB). 0 for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGTP]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not found:
        return 0
    number, letter, binary = found.groups()
    power = " kmgtp".index(letter.lower() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def format_count(number: float) -> str:
    """``format_count(10_280_000_000) == '10.3 G'``."""
    return _scaled(number, "")


def format_seconds(seconds: float) -> str:
    """``0.25 s``, ``12 s``, ``3 min 20 s``, ``5 h 07 min``, ``2 d 03 h``."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
