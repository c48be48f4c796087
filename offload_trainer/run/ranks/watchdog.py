"""Watchdog of the ranks on one node: end the run if a rank is stopped or hung, or if the launcher is gone.

    a thread in each rank, every second ── state of the launcher's children ── stopped? ── counted ──> killed
                           every 10 s   ── state of their threads ── same uninterruptible wait? ──> killed

A rank that is stopped (SIGSTOP) neither answers nor closes its connections, so the others would wait forever. The
kernel reports the stopped state in /proc, and never for a rank that is merely slow: in a long step or save, in C code
that holds the GIL, or on a machine that swaps. So ranks on one node need no heartbeats. The lowest rank that is not
stopped kills the stopped one, and the run ends as after any death of a rank. The watchdog counts checks rather than
seconds, so that a suspended machine triggers nothing. A stop by a debugger is a different state and is ignored.

A set-up or save may take a day, so a timeout cannot tell a slow rank from a hung one. The watchdog uses the criterion
of the kernel's `khungtaskd`: a thread in an uninterruptible wait whose context-switch count has not changed since the
last check is still in the same wait. A slow transfer wakes its thread now and then; one that a driver has lost does
not. A rank that waits for another rank is not in an uninterruptible wait, so it is never killed for that.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from offload_trainer.mesh import RUN

LAUNCHER = "OFFLOAD_TRAINER_LAUNCHER"  # environment variable: the launcher's pid, which may exit before a rank looks

_EVERY = 1.0  # seconds between checks
_LOOKS = 10  # consecutive checks that must find a rank stopped
_INTO_KERNEL = 10  # checks between two inspections of the ranks' threads
_GRACE = 30  # checks between SIGTERM and SIGKILL after the launcher is gone; the launcher's own grace is as long
_GONE = ("Z", "X")  # zombie and dead
RERUN_SENTENCE = "The same command resumes"  # the launcher prints the step it resumes from once all ranks have ended


def _name(rank: str) -> str:
    """Return a rank's process name, at most 15 characters: its number and an id of the run."""
    return f"rank {rank}:{os.environ.get(RUN) or os.environ['MASTER_PORT']:.6}"


def begin_watch(say: Callable[[str], None], *, hung: float = 0) -> None:
    """Start the watchdog thread and set the process name by which other ranks recognize this one.

    Does nothing in a run with a single rank. `say` is called in the thread. `hung`: seconds in one uninterruptible
    wait after which the run is ended; 0: no limit.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        Path("/proc/self/comm").write_text(_name(os.environ["RANK"]))
        threading.Thread(target=_Watch(say, hung=hung).look_on, name="watch", daemon=True).start()


class _Watch:
    """Watchdog that one rank runs over the other ranks of its node."""

    def __init__(self, say: Callable[[str], None], *, hung: float = 0) -> None:
        self._say, self._hung = say, hung
        self._rank, self._launcher = int(os.environ["RANK"]), int(os.environ.get(LAUNCHER, os.getppid()))
        self._is_theirs = bool({LAUNCHER, "TORCHELASTIC_RUN_ID"} & set(os.environ))  # a shell as parent may exit
        self._stopped: dict[int, int] = {}  # consecutive checks that found the process stopped, by pid
        self._waits: dict[_Wait, int] = {}  # consecutive inspections that found the same wait

    def look_on(self) -> None:
        for number in count(1):
            time.sleep(_EVERY)
            if self._is_theirs and os.getppid() != self._launcher:
                self._end_alone()
            found = self._found()
            self._look(found)
            if self._hung and number % _INTO_KERNEL == 0:
                self._look_into_kernel({pid: rank for pid, (rank, _) in found.items()})

    def _found(self) -> dict[int, tuple[int | None, str]]:
        """Return {pid: (rank, state letter of /proc)} of this run's live ranks on this machine.

        The rank is None for a process that has not set its name yet. Such a process counts only under this program's
        launcher or torchrun, all of whose children are ranks.
        """
        found: dict[int, tuple[int | None, str]] = {}
        named = re.compile(_name("([0-9]+)"))
        for pid, name, state in _children(self._launcher):
            of_run = named.fullmatch(name)
            if of_run or self._is_theirs:
                found[pid] = int(of_run[1]) if of_run else None, state
        return found

    def _look(self, found: dict[int, tuple[int | None, str]]) -> None:
        self._stopped = _counted(self._stopped, found)
        awake = [rank for pid, (rank, _) in found.items() if rank is not None and pid not in self._stopped]
        for pid, looks in self._stopped.items():
            if looks >= _LOOKS and min(awake, default=None) == self._rank:
                rank = found[pid][0]
                who = "a rank that had not started" if rank is None else f"rank {rank}"
                self._say(
                    f"{who} (process {pid}) has been stopped for {looks * _EVERY:g} s, as by SIGSTOP: it is killed, "
                    f"and the run ends. {RERUN_SENTENCE}"
                )
                os.kill(pid, signal.SIGKILL)

    def _look_into_kernel(self, found: dict[int, int | None]) -> None:
        """Kill ranks with a thread that has been in one uninterruptible wait for too long, then end this process.

        `found`: the rank of each process. Only the lowest rank that is not hung acts.
        """
        waits = [wait for pid in found for wait in _waits_of(pid)]
        self._waits = {wait: self._waits.get(wait, 0) + 1 for wait in waits}
        hung = {wait.pid: wait for wait, looks in self._waits.items() if self._seconds(looks) >= self._hung}
        others = [rank for pid, rank in found.items() if rank is not None and pid not in hung]
        if not hung or min(others, default=self._rank) != self._rank:
            return
        for pid, wait in hung.items():
            told = _text(Path(f"/proc/{pid}/task/{wait.thread}/wchan")).strip()
            where = told if told.isidentifier() else "the kernel does not say where"
            self._say(
                f"rank {found[pid]} (process {pid}) has been stuck in one kernel wait for "
                f"{self._seconds(self._waits[wait]):g} s ({where}), "
                "as when a driver or a network filesystem hangs: it is killed, and the run ends "
                f"(placement.hang_timeout={self._hung:g}). {RERUN_SENTENCE}"
            )
            os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOKS * _EVERY)
        os._exit(1)  # SIGKILL may not take effect inside the kernel, and then the connections stay open

    def _seconds(self, looks: int) -> float:
        """Return the seconds between the first and the last of `looks` inspections."""
        return (looks - 1) * _INTO_KERNEL * _EVERY

    def _end_alone(self) -> None:
        """Send SIGTERM to this process because the launcher is gone, and SIGKILL if that does not end it."""
        if int(os.environ["LOCAL_RANK"]) == 0:
            self._say(
                f"the launcher of the ranks (process {self._launcher}) has ended, and the run ends. {RERUN_SENTENCE}"
            )
        else:
            time.sleep(_EVERY)  # let the first rank print the reason before this rank's end stops it
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE * _EVERY)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class _Wait:
    """One uninterruptible wait of one thread; a later wait of the thread has higher context-switch counts."""

    pid: int
    thread: int
    switches: tuple[str, ...]


def _waits_of(pid: int) -> list[_Wait]:
    """Return the uninterruptible waits of a process, one for each thread in state D."""
    found = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        if _text(stat).rpartition(")")[2].split()[:1] == ["D"]:
            switches = re.findall(r"ctxt_switches:\s*([0-9]+)", _text(stat.with_name("status")))
            found.append(_Wait(pid, int(stat.parent.name), tuple(switches)))
    return found


def _text(path: Path) -> str:
    """Return the content of a /proc file; "" if its process is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _children(process: int) -> Iterator[tuple[int, str, str]]:
    """Yield (pid, name, state letter) of a process's live children."""
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        for pid in map(int, _text(listed).split()):
            name = _text(Path(f"/proc/{pid}/comm")).strip()
            state = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1]
            if state and state[0] not in _GONE:
                yield pid, name, state[0]


def _counted(stopped: dict[int, int], found: Mapping[int, tuple[object, str]]) -> dict[int, int]:
    """Return the counts of consecutive checks per stopped process, updated with the states in `found`."""
    return {pid: stopped.get(pid, 0) + 1 for pid, (_, state) in found.items() if state == "T"}


# -- watchdog of the launcher ----------------------------------------------------------------------------------------


def begin_launchers_watch(say: Callable[[str], None]) -> None:
    """Start the launcher's watchdog thread, which kills a stopped rank when no other rank is left to do so.

    `say` is called in the thread.
    """
    threading.Thread(target=_LaunchersWatch(say).look_on, name="watch", daemon=True).start()


class _LaunchersWatch:
    """Watchdog that the launcher runs over its ranks."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._begun: set[int] = set()
        self._stopped: dict[int, int] = {}  # consecutive checks that found the process stopped, by pid

    def look_on(self) -> None:
        while True:
            time.sleep(_EVERY)
            ranks = (child for child in _children(os.getpid()) if re.fullmatch(r"rank [0-9]+:[0-9a-f]+", child[1]))
            self._look({pid: (name.partition(":")[0], state) for pid, name, state in ranks})

    def _look(self, found: dict[int, tuple[str, str]]) -> None:
        self._begun |= set(found)
        self._stopped = _counted(self._stopped, found)
        if self._begun == set(found) or set(self._stopped) != set(found):
            return  # all ranks still run, or a running rank can watch the stopped ones
        for pid, looks in self._stopped.items():
            if looks >= _LOOKS:
                self._say(
                    f"{found[pid][0]} (process {pid}) has been stopped for {looks * _EVERY:g} s, as by SIGSTOP, and "
                    f"the others have ended: it is killed. {RERUN_SENTENCE}"
                )
                os.kill(pid, signal.SIGKILL)
