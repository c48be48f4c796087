"""What a step took, read from the process itself: seconds by phase, bytes of drive traffic, memory.

Everything here is counted by a clock, the kernel or CUDA; nothing is worked out from the model's shape.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from offload_trainer.plan.time.step_time import PHASES as OF_STEP
from offload_trainer.storage.atomic_io import bytes_below

PHASES = ("data", *OF_STEP)

_IO = Path("/proc/self/io")
_STATUS = Path("/proc/self/status")


class PhaseClock:
    """Seconds of one step by phase; a phase entered several times (micro-batches) adds up.

    `synchronize` waits for the device. It runs at both edges of a phase: a kernel launch returns at once,
    and without it the time would be charged to whoever waits for the result.
    """

    def __init__(self, *, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize or (lambda: None)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._open: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the body to `name`. Phases do not nest: a second would be counted twice."""
        assert self._open is None, f"phase {name} inside {self._open}"
        self._synchronize()
        self._open, start = name, time.perf_counter()
        try:
            yield
            self._synchronize()
        finally:
            self._open = None
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def move(self, seconds: float, *, from_: str, to: str) -> None:
        """Charge some of a phase to another one."""
        self._seconds[from_] -= seconds
        self._seconds[to] = self._seconds.get(to, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds since the last `take`, with every one of `PHASES`; starts again at zero."""
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return taken


@dataclass(frozen=True)
class IoCount:
    """Bytes this process, all of its threads, moved to and from drives; None where nobody counts."""

    read_bytes: int | None
    written_bytes: int | None

    def __sub__(self, earlier: IoCount) -> IoCount:
        """What happened since `earlier`."""

        def since(now: int | None, then: int | None) -> int | None:
            return None if now is None or then is None else now - then

        return IoCount(since(self.read_bytes, earlier.read_bytes), since(self.written_bytes, earlier.written_bytes))


def read_io() -> IoCount:
    """Totals since the process began: `read_bytes` and `write_bytes` of /proc/self/io (proc(5)).

    The kernel counts what this process sends to the block layer. With O_DIRECT that is every byte, when it is
    submitted. Through the page cache, reads count only where they miss, and writes when they dirty a page,
    which may be long before the drive sees them. Child processes are not in it until they are waited for.
    """
    try:
        counts = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return IoCount(int(counts["read_bytes"]), int(counts["write_bytes"]))
    except (OSError, KeyError):  # another system, or a container that hides it
        return IoCount(None, None)


def peak_rss_bytes() -> int:
    """The most memory this process ever had resident, in bytes."""
    # VmHWM first: getrusage's maximum outlives exec, so a child of a big parent would report the parent.
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maximum if sys.platform == "darwin" else maximum * 1024


def forget_peak_rss() -> None:
    """From now on the peak is counted anew (proc(5), clear_refs); nothing where the system has no such thing."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def current_rss_bytes() -> int:
    """Memory of this process that is resident now, in bytes."""
    now = _status_bytes("VmRSS")
    if now is not None:
        return now
    import psutil  # the only portable way; not needed where /proc is

    return int(psutil.Process().memory_info().rss)


def device_peak_bytes() -> int:
    """The most that torch ever had allocated on this process's CUDA device, in bytes; 0 without one.

    Never imports torch and never initialises CUDA: asking must not cost the memory it asks about.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_allocated())


def allocation_retries() -> int:
    """How often torch has freed its cached blocks since no memory was left on the device; 0 without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def memory_now(swaps: Sequence[Path]) -> dict[str, int]:
    """Bytes of each tier that this process holds: "ram", "gpu" where it uses one, "drives" where it has `swaps`."""
    held = {"ram": current_rss_bytes()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        held["gpu"] = int(torch.cuda.memory_allocated())
    if swaps:
        held["drives"] = sum(map(bytes_below, swaps))
    return held


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024  # "VmHWM:   12345 kB", where kB means KiB
    return None
