"""What the ranks of a node would wait for without end: one of them that is stopped, or a launcher that has gone.

    a thread of each, each second ── the launcher's children, by name ── stopped? ──> counted ──> told, and killed

A rank that is stopped (SIGSTOP) answers nobody and closes no connection. The kernel says which are, whatever they were
at, and never says it of one that is merely slow: in a long step or save, in C with Python's lock held, on a machine
that swaps. So no rank has to show that it lives. The lowest of the others kills it, and the run ends as it does where
a rank dies. Looks are counted and not seconds: a machine that has slept has stopped nobody. A debugger's stop is none.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

LAUNCHER = "OFFLOAD_TRAINER_LAUNCHER"  # in the environment: its process, which may be gone before a rank can look

_EVERY = 1.0  # seconds from one look to the next
_LOOKS = 10  # at which a rank must have been stopped, in a row
_GRACE = 30  # looks after SIGTERM for want of a launcher; as many seconds as torchrun gives ranks that it ends
_GONE = ("Z", "X")
ON_AGAIN = "The same command goes on from the newest checkpoint"


def _name(rank: str) -> str:
    """Of a rank's process, at most 15 characters: which it is, and the port that all of its run have alike."""
    return f"rank {rank}:{os.environ['MASTER_PORT']}"


def begin_watch(say: Callable[[str], None]) -> None:
    """Look after the other ranks of this node from now on, and be found by them; nothing where there is one alone.

    `say` is called in a thread.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        Path("/proc/self/comm").write_text(_name(os.environ["RANK"]))
        threading.Thread(target=_Watch(say).look_on, name="watch", daemon=True).start()


class _Watch:
    """One rank's looks at the others."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._rank, self._launcher = int(os.environ["RANK"]), int(os.environ.get(LAUNCHER, os.getppid()))
        self._is_theirs = "TORCHELASTIC_RUN_ID" in os.environ  # a shell may go, and its children go on
        self._stopped: dict[int, int] = {}  # looks in a row, by process

    def look_on(self) -> None:
        while True:
            time.sleep(_EVERY)
            if self._is_theirs and os.getppid() != self._launcher:
                self._end_alone()
            self._look(self._found())

    def _found(self) -> dict[int, tuple[int | None, str]]:
        """{process: (rank, the kernel's letter for its state)} of this run's ranks on this machine that live.

        The rank is not known of one that has not begun; under a launcher of ours every child is one.
        """
        found: dict[int, tuple[int | None, str]] = {}
        named = re.compile(_name("([0-9]+)"))
        for listed in Path(f"/proc/{self._launcher}/task").glob("*/children"):
            for pid in map(int, _text(listed).split()):
                of_run = named.fullmatch(_text(Path(f"/proc/{pid}/comm")).strip())
                state = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1]
                if state and state[0] not in _GONE and (of_run or self._is_theirs):
                    found[pid] = int(of_run[1]) if of_run else None, state[0]
        return found

    def _look(self, found: dict[int, tuple[int | None, str]]) -> None:
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid, (_, state) in found.items() if state == "T"}
        awake = [rank for pid, (rank, _) in found.items() if rank is not None and pid not in self._stopped]
        for pid, looks in self._stopped.items():
            if looks >= _LOOKS and min(awake, default=None) == self._rank:
                rank = found[pid][0]
                who = "a rank that had not begun" if rank is None else f"rank {rank}"
                self._say(
                    f"{who} (process {pid}) has been stopped for {looks * _EVERY:g} s, as by SIGSTOP: it is killed, "
                    f"and the run ends with it. {ON_AGAIN}"
                )
                os.kill(pid, signal.SIGKILL)

    def _end_alone(self) -> None:
        """SIGTERM to this process, and SIGKILL where that does not end it."""
        if int(os.environ["LOCAL_RANK"]) == 0:
            self._say(f"the launcher of the ranks (process {self._launcher}) has ended, and the run ends. {ON_AGAIN}")
        else:
            time.sleep(_EVERY)  # the first has looked by then, and told why before this one's end stops it
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE * _EVERY)
        os.kill(os.getpid(), signal.SIGKILL)


def _text(path: Path) -> str:
    """What a file of /proc says; nothing where its process is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""
