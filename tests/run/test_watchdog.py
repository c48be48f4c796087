"""Tests of the watchdog: a stopped rank is killed by another one, and ranks end after their launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import run_script

from offload_trainer.run.ranks import watchdog
from offload_trainer.run.ranks.watchdog import _LOOKS, _LaunchersWatch, _Wait, _Watch

HERE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> tuple[_Watch, list[str], list[int]]:
    """Return rank 1's watchdog, its messages, and the process ids that it kills."""
    for name, value in HERE.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    return _Watch(said.append), said, killed


def test_a_rank_that_stays_stopped_is_named_and_killed(looks: tuple[_Watch, list[str], list[int]]) -> None:
    watched, said, killed = looks
    found = {100: (0, "S"), 101: (1, "R"), 102: (2, "S"), 103: (3, "T")}
    for _ in range(_LOOKS):
        watched._look(found)
    assert not killed  # rank 0 is alive and acts first
    watched._look(found | {100: (0, "T"), 104: (None, "S")})
    assert killed == [103]
    assert said[0].startswith("rank 3 (process 103) has been stopped for 11 s")
    for _ in range(_LOOKS):
        watched._look({101: (1, "R"), 104: (None, "T")})
    assert said[1].startswith("a rank that had not started (process 104) has been stopped for 10 s")


def test_a_rank_that_goes_on_again_is_let_live(looks: tuple[_Watch, list[str], list[int]]) -> None:
    """A rank that continues, is traced by a debugger, waits for a drive or has ended is not killed."""
    watched, said, killed = looks
    for state in ("S", "t", "D"):
        for _ in range(_LOOKS - 1):
            watched._look({101: (1, "S"), 102: (2, "T")})
        watched._look({101: (1, "S"), 102: (2, state)})
    for _ in range(_LOOKS):
        watched._look({101: (1, "S")})
    assert (said, killed) == ([], [])


def test_the_launcher_kills_a_rank_that_is_stopped_when_the_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher kills a stopped rank only after the others have ended, since a paused machine stops all of them."""
    said: list[str] = []
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    watched = _LaunchersWatch(said.append)
    for found in ({100: ("rank 0", "T"), 101: ("rank 1", "T")}, {100: ("rank 0", "S"), 101: ("rank 1", "T")}):
        for _ in range(2 * _LOOKS):
            watched._look(found)
    for _ in range(_LOOKS):
        watched._look({})
        for _ in range(_LOOKS - 1):
            watched._look({101: ("rank 1", "T")})
    assert (said, killed) == ([], [])
    watched._look({101: ("rank 1", "T")})
    assert killed == [101]
    assert said[0].startswith(
        "rank 1 (process 101) has been stopped for 10 s, as by SIGSTOP, and the others have ended"
    )


# A prefix for scripts that must have all ranks before one stops: the lowest of the others acts.
ALL_THERE = """
import os, signal, time
from pathlib import Path

gate, go = os.pipe()

def wait_for_all():
    os.close(go)
    os.read(gate, 1)

def let_go(ranks):
    while not all(Path(f"/proc/{pid}/comm").read_text().startswith("rank ") for pid in ranks):
        time.sleep(0.005)
    os.close(go)
"""


LAST = """
import os, signal, threading
from offload_trainer.run.ranks import watchdog as watch

watch._EVERY = 0.02
looks, seen, both_seen = watch._LaunchersWatch._look, set(), threading.Event()

def look(self, found):
    looks(self, found)
    seen.update(found)
    if len(seen) == 2:
        both_seen.set()

watch._LaunchersWatch._look = look

def rank(number, port):
    gate, go = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go)
        os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        watch.begin_watch(print)
        os.read(gate, 1)
        if number == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    return pid, go

second, then = rank(1, 29513)
first, now = rank(0, 29513)
watch.begin_launchers_watch(lambda line: print(line, flush=True))
both_seen.wait()
os.close(now)
assert os.waitpid(first, 0)[1] == 0
os.close(then)  # the second stands still when nobody is left to see it
assert os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) == -signal.SIGKILL
"""


STOPPED = (
    ALL_THERE
    + """
from offload_trainer.run.ranks import watchdog as watch

watch._EVERY = 0.02

def rank(number, port, kind):
    pid = os.fork()
    if not pid:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": "3", "MASTER_PORT": str(port)}
        watch.begin_watch(lambda line: print(number, line, flush=True))
        os.close(go) if number == 7 else wait_for_all()
        if kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    return pid

others = rank(7, 29511, "stopped")
assert os.WIFSTOPPED(os.waitpid(others, os.WUNTRACED)[1])
ours = [rank(0, 29510, "lives"), rank(1, 29510, "stopped"), rank(2, 29510, "lives")]
let_go(ours)
pid, status = os.wait()
assert pid == ours[1] and os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (pid, status)
assert os.waitpid(others, os.WNOHANG | os.WCONTINUED) == (0, 0), "another run's was touched"
for pid in (ours[0], ours[2], others):
    os.kill(pid, signal.SIGKILL)
"""
)

LEFT = """
import os, signal, threading, time
from offload_trainer.run.ranks import watchdog as watch

watch._EVERY = 0.02
heard, sleep = threading.Event(), time.sleep
time.sleep = lambda seconds: heard.wait() if seconds == watch._GRACE * watch._EVERY else sleep(seconds)
reader, writer = os.pipe()
launcher = os.fork()
if not launcher:
    if os.fork():
        os._exit(0)  # and the rank below has no launcher
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_PORT": "29512", "TORCHELASTIC_RUN_ID": "x"}
    os.environ[watch.LAUNCHER] = str(os.getppid()) if os.getppid() != 1 else "2"
    signal.signal(signal.SIGTERM, lambda *_: (os.write(writer, b"told to end\\n"), heard.set()))
    watch.begin_watch(lambda line: os.write(writer, f"{line}\\n".encode()))
    time.sleep(600)
    os._exit(0)
os.close(writer)
told = b""
while more := os.read(reader, 4096):  # until SIGKILL closes the pipe
    told += more
print(told.decode())
"""


def carried_out(script: str, folder: Path) -> str:
    path = folder / "script.py"
    path.write_text(script)
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernel_tells_who_is_stopped(tmp_path: Path) -> None:
    """Stopped ranks are found by the kernel's process states, among this run's ranks only."""
    assert carried_out(STOPPED, tmp_path).startswith("0 rank 1 (process ")


def test_the_kernel_tells_the_launcher_too(tmp_path: Path) -> None:
    assert carried_out(LAST, tmp_path).startswith("rank 1 (process ")


def test_a_rank_without_a_launcher_ends(tmp_path: Path) -> None:
    """A rank without its launcher ends in order, or immediately if that takes too long."""
    told = carried_out(LEFT, tmp_path)
    assert "the launcher of the ranks (process" in told
    assert "told to end" in told


def test_a_process_alone_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    before = Path("/proc/self/comm").read_text()
    watchdog.begin_watch(print)
    assert Path("/proc/self/comm").read_text() == before


HUNG = (
    ALL_THERE
    + """
import sys
from offload_trainer.run.ranks import watchdog as watch

watch._EVERY, watch._INTO_KERNEL = 0.02, 2
fifo = sys.argv[1]

def rank(number, port, hangs=False):
    pid = os.fork()
    if not pid:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": "3", "MASTER_PORT": str(port)}
        watch.begin_watch(lambda line: print(number, line, flush=True), hung=0.2)
        wait_for_all()
        while not hangs:
            time.sleep(600)
        # until somebody opens the FIFO the kernel has this thread, and Python's lock, wait for its child's exec
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
    return pid

ours = [rank(0, 29513, hangs=True), rank(1, 29513), rank(2, 29513)]
let_go(ours)
ended = dict(os.waitpid(-1, 0) for _ in range(2))
codes = {ours.index(pid): os.waitstatus_to_exitcode(status) for pid, status in ended.items()}
assert codes == {0: -signal.SIGKILL, 1: 1}, codes
assert not os.waitpid(ours[2], os.WNOHANG)[0], "one that waits for others is blamed"
os.kill(ours[2], signal.SIGKILL)
os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))
"""
)


def test_a_rank_that_hangs_within_the_kernel_is_named_and_killed(tmp_path: Path) -> None:
    """A rank that hangs in the kernel is killed, even with the GIL held; ranks that sleep meanwhile are not."""
    (tmp_path / "hung.py").write_text(HUNG)
    os.mkfifo(tmp_path / "fifo")
    done = run_script(tmp_path / "hung.py", tmp_path / "fifo")
    assert done.returncode == 0, done.stderr
    (told,) = done.stdout.splitlines()
    assert told.startswith("1 rank 0 (process ")
    assert "placement.hang_timeout=0.2" in told


def test_a_wait_that_goes_on_is_none_that_hangs(
    looks: tuple[_Watch, list[str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that was scheduled between two checks does not hang, although it waits at both, as for a slow drive."""
    watched, said, killed = looks
    watched._hung = 60.0
    switches = [0]
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(watchdog.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(watchdog, "_waits_of", lambda pid: [_Wait(pid, pid, (str(switches[0]),))] if pid == 102 else [])
    found: dict[int, int | None] = {101: 1, 102: 2}
    for _ in range(100):
        switches[0] += 1
        watched._look_into_kernel(found)
    assert (said, killed, ends) == ([], [], [])
    for _ in range(5):
        watched._look_into_kernel(found)
    assert (said, killed, ends) == ([], [], [])  # 50 s
    watched._look_into_kernel(found)
    assert (killed, ends) == ([102], [1])
    assert "rank 2 (process 102) has been stuck in one kernel wait for 60 s" in said[0]
    said.clear()
    watched._look_into_kernel({100: 0, **found})
    assert not said  # rank 0 acts instead
