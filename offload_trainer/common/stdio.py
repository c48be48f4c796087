"""Replacements for stdout and stderr that survive a closed terminal, a closed pipe and a full disk.

Once the other end is closed, the file descriptor is redirected to /dev/null, so that C libraries and signal handlers
do not fail on it either.
"""

import errno
import io
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class LastingStream(io.FileIO):
    """Raw writer that drops output once the reader is gone. `must_arrive`: raise OSError if output to a file fails."""

    def __init__(self, descriptor: int, *, must_arrive: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._must_arrive = must_arrive

    def write(self, data: Any) -> int:
        """Write all of `data` and return its size in bytes."""
        left = whole = memoryview(data).cast("B")
        while left:
            try:
                left = left[os.write(self.fileno(), left) :]
            except BlockingIOError:  # another program made the terminal that both share non-blocking
                select.select([], [self.fileno()], [])
            except OSError as error:
                if error.errno != errno.ENOSPC and not _is_file(self.fileno()):
                    _point_at_nothing(self.fileno())
                elif self._must_arrive:
                    error.filename = "the standard output"
                    raise
                break
        return len(whole)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Within this context, replace sys.stdout and sys.stderr by lasting streams unless they are already redirected.

    Standard descriptors that are closed are opened on /dev/null. Otherwise the next file to be opened could get the
    number of stderr, and messages would be written into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _point_at_nothing(descriptor)
    before = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(before[0], 1, must_arrive=True)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(before[1], 2, must_arrive=False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def write_now(line: str) -> None:
    """Write one line to stderr's descriptor. It is safe in signal handlers, unlike Python's buffered files."""
    with suppress(OSError):  # there is no such descriptor
        LastingStream(2, must_arrive=False).write(f"{line}\n".encode(errors="backslashreplace"))


def _text(before: TextIO | None, descriptor: int, *, must_arrive: bool) -> TextIO:
    if before is not None:
        before.flush()
    encoding = getattr(before, "encoding", None) or "utf-8"
    raw = LastingStream(descriptor, must_arrive=must_arrive)
    return io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


def _is_file(descriptor: int) -> bool:
    with suppress(OSError):  # the descriptor has been closed
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    return False


def _point_at_nothing(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    if nothing != descriptor:
        os.dup2(nothing, descriptor)
        os.close(nothing)
