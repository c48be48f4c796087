"""What the ranks of a node would wait for without end: one of them that is stopped or hangs, a launcher that has gone.

    a thread of each, each second ── the launcher's children, by name ── stopped? ──> counted ──> told, and killed
                      each 10 s   ── their threads ── in the same wait within the kernel? ──> the same

A rank that is stopped (SIGSTOP) answers nobody and closes no connection. The kernel says which are, whatever they were
at, and never says it of one that is merely slow: in a long step or save, in C with Python's lock held, on a machine
that swaps. So no rank has to show that it lives. The lowest of the others kills it, and the run ends as it does where
a rank dies. Looks are counted and not seconds: a machine that has slept has stopped nobody. A debugger's stop is none.

Slow or hung, in a set-up or a save that may well take a day, is told as the kernel tells it of its own tasks
(`khungtaskd`): a thread that is in an uninterruptible wait and has not been switched to since the last look is in the
same one. A transfer that goes on, however slowly, wakes its thread now and then; one that a driver has lost does not.
Who waits for another rank is in no such wait, so nobody is blamed for that.
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

LAUNCHER = "OFFLOAD_TRAINER_LAUNCHER"  # in the environment: its process, which may be gone before a rank can look

_EVERY = 1.0  # seconds from one look to the next
_LOOKS = 10  # at which a rank must have been stopped, in a row
_INTO_KERNEL = 10  # looks from one at the ranks' threads to the next
_GRACE = 30  # looks after SIGTERM for want of a launcher; as many seconds as a launcher gives ranks that it ends
_GONE = ("Z", "X")
ON_AGAIN = "The same command resumes"  # from where the launcher says, once all have ended


def _name(rank: str) -> str:
    """Return a rank's process name, at most 15 characters: its number, and what all ranks of its run share."""
    return f"rank {rank}:{os.environ.get(RUN) or os.environ['MASTER_PORT']:.6}"


def begin_watch(say: Callable[[str], None], *, hung: float = 0) -> None:
    """Look after the other ranks of this node from now on, and be found by them; nothing where there is one alone.

    `say` is called in a thread. `hung`: seconds in one wait within the kernel that end the run; 0: none do.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        Path("/proc/self/comm").write_text(_name(os.environ["RANK"]))
        threading.Thread(target=_Watch(say, hung=hung).look_on, name="watch", daemon=True).start()


class _Watch:
    """One rank's looks at the others."""

    def __init__(self, say: Callable[[str], None], *, hung: float = 0) -> None:
        self._say, self._hung = say, hung
        self._rank, self._launcher = int(os.environ["RANK"]), int(os.environ.get(LAUNCHER, os.getppid()))
        self._is_theirs = bool({LAUNCHER, "TORCHELASTIC_RUN_ID"} & set(os.environ))  # a shell may go, and leave them
        self._stopped: dict[int, int] = {}  # looks in a row, by process
        self._waits: dict[_Wait, int] = {}  # looks in a row

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
        """{process: (rank, the kernel's letter for its state)} of this run's ranks on this machine that live.

        The rank is not known of one that has not begun; under a launcher of ours every child is one.
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
                    f"and the run ends. {ON_AGAIN}"
                )
                os.kill(pid, signal.SIGKILL)

    def _look_into_kernel(self, found: dict[int, int | None]) -> None:
        """`found`: the rank of each process."""
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
                f"(placement.hang_timeout={self._hung:g}). {ON_AGAIN}"
            )
            os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOKS * _EVERY)
        os._exit(1)  # the kernel may never let go of the other, whose connections are open until then

    def _seconds(self, looks: int) -> float:
        """From the first of so many into the kernel to the last."""
        return (looks - 1) * _INTO_KERNEL * _EVERY

    def _end_alone(self) -> None:
        """SIGTERM to this process, and SIGKILL where that does not end it."""
        if int(os.environ["LOCAL_RANK"]) == 0:
            self._say(f"the launcher of the ranks (process {self._launcher}) has ended, and the run ends. {ON_AGAIN}")
        else:
            time.sleep(_EVERY)  # the first has looked by then, and told why before this one's end stops it
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE * _EVERY)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class _Wait:
    """One that cannot be interrupted, of one thread; with its next one it has been switched to more often."""

    pid: int
    thread: int
    switches: tuple[str, ...]


def _waits_of(pid: int) -> list[_Wait]:
    """Of all threads of a process that are in one."""
    found = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        if _text(stat).rpartition(")")[2].split()[:1] == ["D"]:
            switches = re.findall(r"ctxt_switches:\s*([0-9]+)", _text(stat.with_name("status")))
            found.append(_Wait(pid, int(stat.parent.name), tuple(switches)))
    return found


def _text(path: Path) -> str:
    """What a file of /proc says; nothing where its process is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _children(process: int) -> Iterator[tuple[int, str, str]]:
    """(process, name, the kernel's letter for its state) of all that live."""
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        for pid in map(int, _text(listed).split()):
            name = _text(Path(f"/proc/{pid}/comm")).strip()
            state = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1]
            if state and state[0] not in _GONE:
                yield pid, name, state[0]


def _counted(stopped: dict[int, int], found: Mapping[int, tuple[object, str]]) -> dict[int, int]:
    """Looks in a row at which a process was stopped, after one that has `found` its state."""
    return {pid: stopped.get(pid, 0) + 1 for pid, (_, state) in found.items() if state == "T"}


# -- the launcher's own ----------------------------------------------------------------------------------------------


def begin_launchers_watch(say: Callable[[str], None]) -> None:
    """Look, as the launcher, after a rank that is stopped when all others have ended: none of them sees it.

    `say` is called in a thread.
    """
    threading.Thread(target=_LaunchersWatch(say).look_on, name="watch", daemon=True).start()


class _LaunchersWatch:
    """Its looks at the ranks that it has started."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._begun: set[int] = set()
        self._stopped: dict[int, int] = {}  # looks in a row, by process

    def look_on(self) -> None:
        while True:
            time.sleep(_EVERY)
            ranks = (child for child in _children(os.getpid()) if re.fullmatch(r"rank [0-9]+:[0-9a-f]+", child[1]))
            self._look({pid: (name.partition(":")[0], state) for pid, name, state in ranks})

    def _look(self, found: dict[int, tuple[str, str]]) -> None:
        self._begun |= set(found)
        self._stopped = _counted(self._stopped, found)
        if self._begun == set(found) or set(self._stopped) != set(found):
            return  # none has ended, or one that is left sees the others
        for pid, looks in self._stopped.items():
            if looks >= _LOOKS:
                self._say(
                    f"{found[pid][0]} (process {pid}) has been stopped for {looks * _EVERY:g} s, as by SIGSTOP, and "
                    f"the others have ended: it is killed. {ON_AGAIN}"
                )
                os.kill(pid, signal.SIGKILL)
