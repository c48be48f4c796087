"""Exceptions that are no bugs, the exit code of each, and which errors of others the user sees without a traceback.

Who raises one writes its message: what happened, the numbers, and what to do.
"""

import errno
import re
import signal

from offload_trainer.common.packages import explain_import

RERUN_HINT = "the same command resumes"  # run/resume.py completes this phrase with the step it resumes from
STORE = "OFFLOAD_TRAINER_STORE"  # environment variable: the file through which the launcher's ranks find each other
LOST = 69  # exit code of a rank that ends only because another rank has ended
# What torch says if cudaMalloc fails, and if the libraries that it calls have no memory.
_FULL = re.compile("CUDA out of memory|CUDA error: out of memory|_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED")


class TrainerError(Exception):
    """An error that stops the run and is not a bug in this package: exit code 1, unless it says another."""

    exit_code = 1

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = self.exit_code if code is None else code


class UserError(TrainerError):
    """A mistake of the user's, or a refused plan: exit code 2. Nothing has been written."""

    exit_code = 2


class NonFiniteGradient(TrainerError):
    """NaN or infinity in the step's gradients; weights and state are unchanged, and a session's caller may continue."""


class GpuFull(TrainerError):
    """The GPU has too little free memory. run/train.py then continues with a smaller plan, if there is one rank."""

    def __init__(self, error: BaseException, *, unvalidated: int = 0) -> None:
        """Take torch's error, and the step after which a validation ran out of memory (0: it was something else)."""
        text = " ".join(str(error).split())
        self.unvalidated, self.missing = unvalidated, 0  # bytes; 0: not known
        if sizes := re.search(r"Tried to allocate ([\d.]+) (\w+)\..*?of which ([\d.]+) (\w+) is free", text):
            units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
            asked, free = (int(float(sizes[n]) * units[sizes[n + 1]]) for n in (1, 3))
            self.missing = max(0, asked - free)
            text = f"{sizes[1]} {sizes[2]} were asked for, {sizes[3]} {sizes[4]} were free"
        super().__init__(f"the GPU ran out of memory: {text[:500]}")


def fills_gpu(error: BaseException | None) -> bool:
    """Return whether this error of torch, or one that caused it, says that a GPU has too little free memory."""
    while error is not None and not isinstance(error, PeerFailed | Interrupted):
        if isinstance(error, GpuFull) or _FULL.search(str(error)):
            return True
        error = error.__cause__
    return False


class PeerFailed(TrainerError):
    """Another rank has failed. That rank reports the error, so this one exits without printing anything."""


class Interrupted(TrainerError):
    """A signal asked the run to stop, and it stopped in order: exit code 128 + the signal's number."""


class Stopped(KeyboardInterrupt):
    """A signal ended the program immediately: exit code 128 + its number. `unsaved`: why progress is lost, if it is."""

    def __init__(self, signal_number: int, *, unsaved: str = "") -> None:
        name = signal.Signals(signal_number).name
        super().__init__(f"{name}: {unsaved}; {RERUN_HINT}" if unsaved else f"stopped by {name}, with nothing to save")
        self.exit_code = 128 + signal_number


# Errors of a disk that is full, read-only, failing or gone; `_DOORS` holds errors of permissions and paths.
_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO}
_DOORS = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}


def explain(error: BaseException) -> str | None:
    """Return the message for the user; None for a bug, which is shown with its traceback."""
    if isinstance(error, TrainerError | Stopped):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "stopped by SIGINT, with nothing to save"
    if isinstance(error, ImportError):
        return explain_import(error)
    if isinstance(error, OSError) and error.errno in _DISKS | _DOORS:
        text = f"{error.filename or 'a file'}: {reason(error)}"
        return text if error.errno in _DOORS else f"{text}. Free space or mend that disk; {RERUN_HINT}"
    return None


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with this error."""
    if isinstance(error, TrainerError | Stopped):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def reason(error: BaseException) -> str:
    """Return the operating system's message of an OSError, and the message of any other error."""
    return getattr(error, "strerror", None) or str(error)
