"""stdout and stderr that a command outlives: a terminal that closes, a pipe whose reader has gone, a full disk.

A run must not end because nobody looks at it any more. Once the other end is gone the descriptor itself is pointed at
/dev/null, so that nothing else in the process, in C or in a signal's handler, meets an error there.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class LastingStream(io.RawIOBase):
    """A descriptor to write to. What nobody can read any more is dropped.

    `must_arrive`: what does not get into a file is an OSError, as for output that somebody asked for.
    """

    def __init__(self, descriptor: int, *, must_arrive: bool) -> None:
        self._descriptor, self._must_arrive = descriptor, must_arrive

    def write(self, data: object) -> int:
        """Write all of `data`, and return its bytes."""
        left = whole = memoryview(data).cast("B")  # type: ignore[arg-type]
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another program made the terminal that both share non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                if error.errno != errno.ENOSPC and not _is_file(self._descriptor):
                    _point_at_nothing(self._descriptor)
                elif self._must_arrive:
                    error.filename = "the standard output"
                    raise
                break
        return len(whole)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Inside, sys.stdout and sys.stderr are lasting ones, if they are the process's own. Closed ones lead nowhere.

    Without that last, the next file to be opened would get the number of stderr, and messages would go into it.
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
    """One line to stderr's descriptor, from a signal's handler: Python's files refuse to be entered twice."""
    LastingStream(2, must_arrive=False).write(f"{line}\n".encode(errors="backslashreplace"))


def _text(before: TextIO | None, descriptor: int, *, must_arrive: bool) -> TextIO:
    """By whole lines; a name that has no spelling in the terminal's encoding is shown escaped."""
    if before is not None:
        before.flush()
    encoding = getattr(before, "encoding", None) or "utf-8"
    raw = LastingStream(descriptor, must_arrive=must_arrive)
    return io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)  # type: ignore[type-var]


def _is_file(descriptor: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:  # closed by somebody
        return False


def _point_at_nothing(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    if nothing != descriptor:
        os.dup2(nothing, descriptor)
        os.close(nothing)
