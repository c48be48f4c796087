"""Stand-ins for a device and a drive whose transfers complete late and out of order, so that a missing wait reads stale
bytes.

`HeldWrites` delays chosen writes and records requests for the same bytes before those writes have finished.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.device import Copies, Read, ReturnCopy
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Future, Transfers, bytes_of


def late(work: Callable[[], None]) -> Future:
    """Run `work` on a new thread after a random delay."""
    future = Future()
    delay = random.Random(threading.active_count() * 7 + time.monotonic_ns()).uniform(0.0005, 0.004)

    def carry_out() -> None:
        time.sleep(delay)
        error = None
        try:
            work()
        except BaseException as caught:
            error = caught
        future.finish_part(error)

    threading.Thread(target=carry_out, daemon=True).start()
    return future


class LateTransfers(Transfers):
    def __init__(self) -> None:
        pass

    def read(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        bytes_of(buffer).fill_(0xFF)  # Until the bytes arrive, the buffer holds NaN.
        return late(lambda: file.read(memoryview(bytes_of(buffer).numpy()), offset))

    def write(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        def write() -> None:
            file.write(memoryview(bytes_of(buffer).numpy()), offset)

        return late(write)

    def close(self) -> None:
        pass


class HeldWrites(Transfers):
    """Transfers that delay the next `hold[name]` writes to files of that name by `patience` seconds, or until `go` is
    set.

    `crossed` lists requests for the same bytes of a file or of memory in the meantime, which are errors in the caller.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hold: dict[str, int] = {}
        self.patience = 0.5
        self.go = threading.Event()
        self.crossed: list[str] = []
        self.held: list[tuple[DriveFile, int, torch.Tensor]] = []
        self._lock = threading.Lock()

    def read(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        with self._lock:
            self._look("read", file, offset, buffer)
        return super().read(file, offset, buffer)

    def write(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        with self._lock:
            self._look("written", file, offset, buffer)
            held = self.hold.get(file.path.name, 0)
            if held:
                self.hold[file.path.name] = held - 1
                self.held.append((file, offset, buffer))
        return self._held_back(file, offset, buffer) if held else super().write(file, offset, buffer)

    def _held_back(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        future = Future()

        def later() -> None:
            self.go.wait(self.patience)
            with self._lock:
                self.held = [one for one in self.held if one[2] is not buffer]
                arrived = Transfers.write(self, file, offset, buffer)
            arrived.then(future.finish_part)

        threading.Thread(target=later, daemon=True).start()
        return future

    def _look(self, verb: str, file: DriveFile, offset: int, buffer: torch.Tensor) -> None:
        for its, start, memory in self.held:
            if its is file and start < offset + buffer.nbytes and offset < start + memory.nbytes:
                self.crossed.append(f"{file.path.name}: {verb} at {offset}")
            first, other = memory.data_ptr(), buffer.data_ptr()
            if first < other + buffer.nbytes and other < first + memory.nbytes:
                self.crossed.append(f"{file.path.name}: the memory of a write is {verb}")


class FailingWrites(Transfers):
    """Transfers whose writes to the files that `failing` names fail."""

    def __init__(self, *failing: str) -> None:
        super().__init__()
        self.failing = list(failing)

    def write(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        if file.path.name not in self.failing:
            return super().write(file, offset, buffer)
        future = Future()
        future.finish_part(TrainerError("the drive failed"))
        return future


class LateDevice:
    """A device that computes on the CPU, with copies (downloads included) as asynchronous as a GPU's."""

    place, is_cuda, in_host_memory = torch.device("cpu"), False, False

    def __init__(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("the stand-in computes on the CPU, and what it is compared with on the GPU")

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return host_buffer(elements * dtype.itemsize).view(dtype)

    def mark(self) -> None:
        return None

    def fetch(self, source: torch.Tensor | Read, into: torch.Tensor, *, after: Any) -> Future:
        return self.upload(source, into, after=after) if isinstance(source, torch.Tensor) else source(into)

    def upload(self, values: torch.Tensor, into: torch.Tensor, *, after: Any) -> Future:
        bytes_of(into).fill_(0xFF)
        return late(lambda: into.copy_(values))

    def keep(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        return self.upload(values, into, after=None)

    def copy_back(self, source: torch.Tensor, into: torch.Tensor, *, after: Any, ready: Future) -> ReturnCopy:
        into.fill_(float("nan"))
        future = Future()
        ready.then(lambda error: late(lambda: into.copy_(source)).then(future.finish_part))
        return ReturnCopy(future, future)

    def download(self, copies: Copies, *, after: Any = None) -> Future:
        for _, into in copies:
            into.fill_(float("nan"))
        return late(lambda: [into.copy_(values) for values, into in copies])

    def side_stream(self, *, after: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def reached(self) -> Future:
        return late(lambda: None)

    def close(self) -> None:
        pass


def hasty(patch: pytest.MonkeyPatch) -> None:
    """Remove the wait for prefetched weights: every unit counts as arrived as soon as its copy starts."""
    start = WeightPrefetcher._start

    def begun(stream: WeightPrefetcher, unit: int, number: int) -> None:
        start(stream, unit, number)
        stream._slots[number].arrival = type("Arrived", (), {"wait": lambda self: None})()

    patch.setattr(WeightPrefetcher, "_start", begun)
