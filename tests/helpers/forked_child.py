"""Run test code in a forked child, for events a process survives only once: being killed, losing its terminal."""

import os
import pty
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def in_a_fork(work: Callable[[], int | None], *, streams: Callable[[], None] = lambda: None) -> int:
    """Run `work` in a fork with the real stdout and stderr; return its exit code, -N if signal N killed it."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 99
    if "torch" in sys.modules:  # a fork has none of the threads that OpenMP would wait for
        sys.modules["torch"].set_num_threads(1)
    try:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        streams()
        code = work() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def lose_streams(kind: str) -> None:
    """Replace stdout and stderr with a pipe or terminal whose reading end is closed."""
    reader, writer = os.pipe() if kind.endswith("pipe") else pty.openpty()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    os.close(reader)


def watched_memory() -> Callable[[], int]:
    """Return a function that returns the peak of this process's anonymous memory in bytes, from this call on."""
    peak = 0

    def look() -> int:
        nonlocal peak
        held = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        peak = max(peak, int(held[0]) * 1024)
        return peak

    def watch() -> None:
        while look():
            time.sleep(0.002)

    threading.Thread(target=watch, daemon=True).start()
    return look
