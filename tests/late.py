"""A device and a drive whose copies and reads complete late and out of order: whoever does not wait reads old bytes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from offload_trainer.offloading.device import Read, Return
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Future, bytes_of


def late(work: Callable[[], None]) -> Future:
    """Do `work` on a thread of its own, after a while that differs from one call to the next."""
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


class LateTransfers:
    name = "late"

    def read(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        bytes_of(buffer).fill_(0xFF)  # what is there before the bytes arrive is NaN
        return late(lambda: file.read(memoryview(bytes_of(buffer).numpy()), offset))

    def write(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        def write() -> None:
            file.write(memoryview(bytes_of(buffer).numpy()), offset)

        return late(write)

    def close(self) -> None:
        pass


class LateDevice:
    """The CPU, with copies as asynchronous as a GPU's; downloads too."""

    place, is_cuda = torch.device("cpu"), False

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

    def bring_back(self, source: torch.Tensor, into: torch.Tensor, *, after: Any, ready: Future) -> Return:
        into.fill_(float("nan"))
        future = Future()
        ready.then(lambda error: late(lambda: into.copy_(source)).then(future.finish_part))
        return Return(future, future)

    def download(self, values: torch.Tensor, into: torch.Tensor, *, after: Any = None) -> Future:
        into.fill_(float("nan"))
        return late(lambda: into.copy_(values))

    def beside(self, *, after: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def reached(self) -> Future:
        return late(lambda: None)

    def close(self) -> None:
        pass
