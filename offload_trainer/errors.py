"""What can stop a run, what is said of it, and the exit code that each kind ends the process with.

A message says what happened, the numbers, and what to do. Only what `explain` knows is shown without a traceback.
"""

from __future__ import annotations

import errno
import os
import signal

from offload_trainer.packages import explain_import

AGAIN = "the same command resumes"  # from where says who looks at its files: run/resume_point.py
LOST = 69  # exit code of a rank whose only trouble is that another has gone


class TrainerError(Exception):
    """Something stopped the run that is not a bug here: exit code 1."""

    exit_code = 1


class UserError(TrainerError):
    """A mistake of the user's, or a refused plan: exit code 2, and nothing has been written."""

    exit_code = 2


class NonFiniteGradient(TrainerError):
    """The step's gradients hold a NaN or an infinity; nothing was changed by them."""


class PeerFailed(TrainerError):
    """Another rank's failure, which that rank tells of: this one ends without a word."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


class Interrupted(TrainerError):
    """A signal asked the run to stop, and it came to an end in order: 128 + the signal's number."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class Stopped(KeyboardInterrupt):
    """A signal ended the program where it stood: 128 + the signal's number. `unsaved`: it was a second one."""

    def __init__(self, signal_number: int, *, unsaved: bool = False) -> None:
        name = signal.Signals(signal_number).name
        again = f"a second signal, {name}, ended it at once, unsaved; {AGAIN}"
        super().__init__(again if unsaved else f"stopped by {name}, with nothing to save")
        self.exit_code = 128 + signal_number


# What a disk says that is full, read-only, failing or gone, or that is not this user's.
_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO}
_MEND = f"Free space or mend that disk; {AGAIN}"
_DOORS = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


def explain(error: BaseException) -> str | None:
    """The line that a user is shown, or None for a bug, of which the traceback says more."""
    if isinstance(error, TrainerError | Stopped):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "stopped by SIGINT, with nothing to save"
    if isinstance(error, ImportError):
        return explain_import(error)
    if isinstance(error, OSError) and error.errno in _DISKS | _DOORS:
        told = f"{error.filename or 'a file'}: {reason(error)}"
        return told if error.errno in _DOORS else f"{told}. {_MEND}"
    return None


def exit_code(error: BaseException) -> int:
    """What a process ends with after this."""
    if isinstance(error, TrainerError | Stopped):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def reason(error: OSError, directory: str | os.PathLike[str] | None = None) -> str:
    """The system's words for it; where a filesystem is full, whether of bytes or of files.

    `directory`: on that filesystem, if the error names no file.
    """
    place = directory or (os.path.dirname(error.filename) if isinstance(error.filename, str | os.PathLike) else None)
    if error.errno == errno.ENOSPC and place is not None:
        try:
            room = os.statvfs(place)
        except OSError:
            return str(error.strerror)
        if room.f_files and not room.f_favail:
            return f"No inodes left: the filesystem holds {room.f_files} files and takes no more, whatever their size"
    return error.strerror or str(error)
