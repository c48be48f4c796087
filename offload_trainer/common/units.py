"""Format bytes, seconds and counts for messages, and escape text. Sizes are decimal (1 GB = 10**9 bytes)."""

from shutil import get_terminal_size


def _scaled(number: float, suffix: str) -> str:
    number = float(f"{number:.3g}")  # rounded before the letter is chosen: 999,999 is 1 M, not 1e+03 k
    for step, letter in ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if abs(number) >= step:
            return f"{number / step:.3g} {letter}{suffix}".rstrip()
    return f"{number:.3g} {suffix}".rstrip()


def format_bytes(number: float) -> str:
    """Format a size in bytes: ``format_bytes(12_345_678) == '12.3 MB'``."""
    return _scaled(number, "B")


def screen_columns() -> int:
    """Return the width of text for the terminal: at most 100, and 100 where there is no terminal."""
    return min(100, get_terminal_size((100, 24)).columns)


def shown(text: object) -> str:
    """Escape unprintable characters in text for a terminal, which may contain untrusted file names and content.

    Newlines stay. Lone surrogates, by which Python represents bytes that are not UTF-8, are escaped too.
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in str(text)
    )


def is_utf8(text: str) -> bool:
    """Return False if `text` has lone surrogates, as from a file name whose bytes are not UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def format_count(number: float) -> str:
    """Format a count: ``format_count(10_280_000_000) == '10.3 G'``."""
    return _scaled(number, "")


def format_seconds(seconds: float) -> str:
    """Format a duration: ``0.25 s``, ``12 s``, ``3 min 20 s``, ``5 h 07 min``, ``2 d 03 h``."""
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
