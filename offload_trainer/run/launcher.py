"""Launcher for the ranks of one node: start them, forward signals, and report why the run ended if one failed.

The first rank that fails prints its error; ranks that end only because another is gone print nothing (`errors.LOST`).
The exit code is that of the rank that failed first, or 128 + the number of the signal that ended the run. Ranks notice
a stopped or hung one (`ranks.py`); the launcher kills what does not end.
"""

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from offload_trainer.errors import LOST, STORE, UserError
from offload_trainer.packages import is_installed, lacks
from offload_trainer.run.signals import STOPPING

LAUNCHER = "OFFLOAD_TRAINER_LAUNCHER"  # environment variable: the launcher's pid, which may exit before a rank looks
COMMAND = [sys.executable, "-m", "offload_trainer", "train"]  # of a rank

_STOPPED = {code for number in STOPPING for code in (-number, 128 + number)}  # exit codes of ranks told to stop
_GRACE = 30.0  # seconds between SIGTERM and SIGKILL to ranks after another one has ended
_LOOK = 1.0  # seconds between checks of the ranks when no signal arrives
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
ECHO = 5.0  # seconds within which a rank gets a signal twice: sent to it too, and passed on by its launcher


def start_ranks(words: Sequence[str], *, count: int, engine: str) -> None:
    """Start `count` ranks of the same command and exit with their exit code; return if this process trains itself."""
    if count == 1 or "RANK" in os.environ:
        return
    if engine == "deepspeed" and not is_installed("deepspeed"):
        raise UserError(lacks("--engine deepspeed", "deepspeed"))
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(run_ranks(words, count=count))


def run_ranks(words: Sequence[str], *, count: int) -> int:
    """Run `count` ranks of `offload-train train WORDS` to their end; return the exit code.

    They have separate sessions, so that a terminal's signals reach the launcher only, and its signal mask before.
    """
    own, file = os.getpid(), os.memfd_create("offload-trainer")  # without a name; other users cannot open it
    all_alike = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, LAUNCHER: own, STORE: f"/proc/{own}/fd/{file}"}
    waited = {number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN}  # SIGHUP under nohup
    waited |= {signal.SIGCHLD, signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    living: dict[int, subprocess.Popen[bytes]] = {}
    for rank in range(count):
        place = {name: str(value) for name, value in {**all_alike, "RANK": rank, "LOCAL_RANK": rank}.items()}
        living[rank] = subprocess.Popen(
            [*COMMAND, *words],
            env={**os.environ, **place},
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
        )
    return _report_failure(*wait_for(living, waited), words)


def wait_for(living: dict[int, subprocess.Popen[bytes]], waited: set[signal.Signals]) -> tuple[dict[int, int], int]:
    """Wait for all ranks, which the first failure ends, and pass on the `waited` signals, which are blocked.

    Return (rank: code or -signal) of each failure in order, and the first signal that asked the run to stop, or 0.
    """
    failed: dict[int, int] = {}
    stopped = 0
    until, ask = math.inf, math.inf  # when the ranks that are left get SIGKILL and SIGTERM

    def send(number: int) -> None:
        for process in living.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    while living:
        arrived = signal.sigtimedwait(waited, _LOOK)
        number = arrived.si_signo if arrived else 0
        # Python leaves the number uninitialised if the launcher is stopped beyond the timeout.
        if number in waited - {signal.SIGCHLD}:
            send(number)
            if number in STOPPING:
                stopped = stopped or number
        for rank, process in list(living.items()):
            if (code := process.poll()) is not None:
                del living[rank]
            if code:
                failed[rank] = code
        # Ranks that were told to stop may be saving, unless one of them has ended for another reason.
        now = time.monotonic()
        if until == math.inf and any(not (stopped and code in _STOPPED) for code in failed.values()):
            until = now + _GRACE
            ask = math.inf if stopped else now + _LOOK  # most see closed connections, and end without a word
        if now > ask:
            ask = math.inf
            send(signal.SIGTERM)
            send(signal.SIGCONT)  # one that is stopped would not end before SIGKILL
        if now > until:
            send(signal.SIGKILL)
    return failed, stopped


def first_failure(failed: dict[int, int]) -> tuple[int, int]:
    """Return (rank, exit code) of the rank whose failure caused the others, in the order of `wait_for`.

    The launcher ends the remaining ranks with SIGTERM, so SIGTERM and `LOST` count only if there is nothing else.
    """
    own = [rank for rank, code in failed.items() if code not in (LOST, -signal.SIGTERM, 128 + signal.SIGTERM)]
    rank = next(iter(own or failed))
    return rank, failed[rank]


def _report_failure(failed: dict[int, int], stopped: int, words: Sequence[str]) -> int:
    """Print why the run ended, unless a rank has, and where the command `words` resumes; return the exit code."""
    rank, code = first_failure(failed) if failed else (0, 0)
    unsaved = [code for code in failed.values() if 0 < code < 128 and code != LOST]
    if stopped and unsaved:  # the rank has printed why
        return unsaved[0]
    if stopped:
        why, code = f"stopped by {signal.Signals(stopped).name}", 128 + stopped
    elif code < 0:
        why, code = f"rank {rank} was killed by {signal.Signals(-code).name}, and the run ended with it", 128 - code
    elif code == LOST:
        why, code = "the ranks lost each other", 1
    elif code - 128 in {*signal.Signals}:
        why = f"rank {rank} was terminated by {signal.Signals(code - 128).name}, and the run ended with it"
    else:
        return code
    from offload_trainer.run.resume import resume_hint  # late: it imports torch

    print(f"offload-train: {why}; {resume_hint(words)}", file=sys.stderr)
    return code


def has_launcher() -> bool:
    """Return True in a rank that was started by this program's launcher or by torchrun."""
    started = {LAUNCHER, "TORCHELASTIC_RUN_ID"} & set(os.environ)
    return bool(started) and int(os.environ.get("WORLD_SIZE", "1")) > 1


def end_with_launcher() -> None:
    """Let the kernel send SIGTERM to this rank when its launcher ends, or send it now if that is gone already."""
    if has_launcher():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ.get(LAUNCHER, os.getppid())):
            os.kill(os.getpid(), signal.SIGTERM)
