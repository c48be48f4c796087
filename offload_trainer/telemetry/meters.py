"""Measurements of a step in this process, by a clock, the kernel or CUDA: seconds by phase, drive traffic, memory."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from offload_trainer.plan.step_time import PHASES as OF_STEP
from offload_trainer.storage.atomic_io import bytes_below

PHASES = ("data", *OF_STEP)

_IO = Path("/proc/self/io")
_STATUS = Path("/proc/self/status")


class PhaseClock:
    """Seconds of one step by phase; a phase entered several times (micro-batches) adds up.

    A phase's edges are times of the host after `synchronize`, which waits for the device, since kernel launches return
    immediately. With `stream` they are events in the current CUDA stream, for which the host waits in `take` only.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None, *, stream: bool = False) -> None:
        self._synchronize, self._stream = synchronize, stream
        self._passed: list[tuple[str, Any, Any]] = []  # phases with their edges
        self._moved: list[tuple[str, float]] = []
        self._open: str | None = None

    def _edge(self) -> Any:
        if not self._stream:
            self._synchronize()
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the body's time to phase `name`. Phases must not nest, since time would be counted twice."""
        assert self._open is None, f"phase {name} inside {self._open}"
        start, self._open = self._edge(), name
        try:
            yield
        finally:
            self._open = None
            self._passed.append((name, start, self._edge()))

    def move(self, seconds: float, *, from_: str, to: str) -> None:
        self._moved += [(from_, -seconds), (to, seconds)]

    def take(self) -> dict[str, float]:
        """Return the seconds since the last `take`, once the device has done what was queued, and reset them."""
        if self._stream:
            for _, _, end in self._passed:
                end.synchronize()
            passed = [(name, start.elapsed_time(end) / 1000.0) for name, start, end in self._passed]
        else:
            passed = [(name, end - start) for name, start, end in self._passed]
        taken = dict.fromkeys(PHASES, 0.0)
        for name, seconds in passed + self._moved:
            taken[name] = taken.get(name, 0.0) + seconds
        self._passed.clear()
        self._moved.clear()
        return taken


@dataclass(frozen=True)
class IoCount:
    """Bytes moved to and from drives by all threads of this process; None where the system does not count them."""

    read_bytes: int | None
    written_bytes: int | None

    def __sub__(self, earlier: Self) -> Self:
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return type(self)(*(None if None in pair else pair[0] - pair[1] for pair in pairs))


def read_io() -> IoCount:
    """Return the totals since the process started: `read_bytes` and `write_bytes` of /proc/self/io (proc(5)).

    With O_DIRECT every byte counts when it is submitted. Through the page cache, reads count only on a miss, and writes
    when they dirty a page. Child processes count once they have been waited for.
    """
    try:
        counts = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return IoCount(int(counts["read_bytes"]), int(counts["write_bytes"]))
    except (OSError, KeyError):  # another system, or a container that hides the file
        return IoCount(None, None)


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    # getrusage's maximum survives exec, so a child of a large parent would report the parent's. gVisor has no peak.
    return _status_bytes("VmHWM") or current_rss_bytes()


def forget_peak_rss() -> None:
    """Reset the peak of resident memory (proc(5), clear_refs). Do nothing where the system does not support it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def current_rss_bytes() -> int:
    return _status_bytes("VmRSS")


def memory_of_step(swaps: Sequence[Path]) -> dict[str, Any]:
    """Return the fields of a `StepRecord` on memory, of this process and its CUDA device if it uses one.

    `memory` is what each tier has now: "ram", "gpu" if CUDA is in use, and "drives" if `swaps` (directories of page
    files) is not empty. CUDA is not initialised, since that would itself use memory.
    """
    cuda = torch.cuda if torch.cuda.is_initialized() else None
    held = {"ram": current_rss_bytes()}  # read before the peak, so that the peak is at least as high
    if cuda:
        held["gpu"] = cuda.memory_allocated()
    if swaps:
        held["drives"] = sum(map(bytes_below, swaps))
    return {
        "memory": held,
        "host_rss_bytes": peak_rss_bytes(),
        "device_peak_bytes": cuda.max_memory_allocated() if cuda else 0,
        "allocation_retries": cuda.memory_stats().get("num_alloc_retries", 0) if cuda else 0,
    }


def _status_bytes(field: str) -> int:
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    found = (int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))  # "VmHWM:   12345 kB" means KiB
    return 1024 * next(found, 0)
