"""Launcher for the ranks of one node: start them, forward signals, and report why the run ended if one failed.

The first rank that fails prints its error; ranks that end only because another is gone print nothing (`errors.LOST`),
so that the reason is the last message. The exit code is that of the rank that failed first, or 128 + the number of the
signal that ended the run.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from offload_trainer.errors import LOST
from offload_trainer.mesh import RUN
from offload_trainer.run.ranks.watchdog import LAUNCHER, begin_launchers_watch

_STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_GRACE = 30.0  # seconds between SIGTERM and SIGKILL to the other ranks after one has failed
_LOOK = 1.0  # seconds between checks of the ranks when no signal arrives


@dataclass(frozen=True)
class Ended:
    """Exit code of a rank, negative for a signal, and the time at which the launcher saw it."""

    code: int
    timestamp: float


def run_ranks(words: Sequence[str], *, count: int) -> int:
    """Run `count` ranks of `offload-train train WORDS` to their end; return the exit code."""
    waited = {number for number in _STOPPING if signal.getsignal(number) != signal.SIG_IGN}  # SIGHUP under nohup
    waited |= {signal.SIGCHLD, signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    ranks = _Ranks(waited, before)
    ranks.start([sys.executable, "-m", "offload_trainer", "train", *words], count=count)
    begin_launchers_watch(lambda line: print(f"offload-train: {line}", file=sys.stderr, flush=True))
    return _told(ranks.wait(), words, stopped=ranks.stopped)


@dataclass
class _Ranks:
    """Processes of the ranks of one run."""

    waited: set[signal.Signals]  # signals that the launcher blocks and receives by sigtimedwait
    before: set[int]  # signal mask before that, which the ranks inherit
    stopped: int = 0  # first signal that asked the run to stop, or 0
    living: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)  # rank -> process

    def start(self, command: Sequence[str], *, count: int) -> None:
        """Start the ranks in separate sessions, so that a terminal's signals reach the launcher only."""
        all_alike = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, LAUNCHER: os.getpid(), RUN: secrets.token_hex(16)}
        for rank in range(count):
            place = {name: str(value) for name, value in {**all_alike, "RANK": rank, "LOCAL_RANK": rank}.items()}
            self.living[rank] = subprocess.Popen(
                command,
                env={**os.environ, **place},
                start_new_session=True,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, self.before),
            )

    def wait(self) -> dict[int, Ended]:
        """Wait until all ranks have ended; return how each failed one ended. The first failure ends the others."""
        failed: dict[int, Ended] = {}
        until: float | None = None
        while self.living:
            told = signal.sigtimedwait(self.waited, _LOOK)
            if told and told.si_signo != signal.SIGCHLD:
                self._send(told.si_signo)
            if told and told.si_signo in _STOPPING:
                self.stopped = self.stopped or told.si_signo
            for rank, process in list(self.living.items()):
                code = process.poll()
                if code is not None:
                    del self.living[rank]
                if code:
                    failed[rank] = Ended(code, time.monotonic())
            if failed and until is None and not self.stopped:  # ranks that were told to stop may be saving
                until = time.monotonic() + _GRACE
                self._send(signal.SIGTERM)
            if until is not None and time.monotonic() > until:
                self._send(signal.SIGKILL)
        return failed

    def _send(self, number: int) -> None:
        for process in self.living.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)


def first_failure(failed: dict[int, Ended]) -> tuple[int, int]:
    """Return (rank, exit code) of the rank whose failure caused the others; the code is negative for a signal.

    The launcher ends the remaining ranks with SIGTERM, so SIGTERM and `LOST` count only if there is nothing else.
    """
    codes = {rank: one.code for rank, one in failed.items()}
    own = [rank for rank in codes if codes[rank] not in (LOST, -signal.SIGTERM, 128 + signal.SIGTERM)]
    rank = min(own or codes, key=lambda rank: failed[rank].timestamp)
    return rank, codes[rank]


def _told(failed: dict[int, Ended], words: Sequence[str], *, stopped: int) -> int:
    """Print why the run ended, unless a rank has, and where the command `words` resumes; return the exit code."""
    if stopped:
        print(f"offload-train: stopped by {signal.Signals(stopped).name}; {_goes_on(words)}", file=sys.stderr)
        return 128 + stopped
    if not failed:
        return 0
    rank, code = first_failure(failed)
    if code < 0:
        name = signal.Signals(-code).name
        killed = f"offload-train: rank {rank} was killed by {name}, and the run ended with it"
        print(f"{killed}; {_goes_on(words)}", file=sys.stderr)
        return 128 - code
    if code == LOST:
        print(f"offload-train: the ranks lost each other; {_goes_on(words)}", file=sys.stderr)
        return 1
    if code > 128:
        name = signal.Signals(code - 128).name
        print(f"offload-train: rank {rank} was terminated by {name}, and the run ended with it", file=sys.stderr)
    return code


def _goes_on(words: Sequence[str]) -> str:
    """Return a sentence on where the command `words` would resume from."""
    from offload_trainer.run.resume_point import (
        resume_hint,  # imported late to keep the launcher small while ranks train
    )

    return resume_hint(words)
