"""Engines whose copies, reads and writes complete late and out of order, so that a missing wait reads stale bytes."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import EmulatedGpu, queued
from engine_bench import engine

from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.offloading.device import CudaDevice
from offload_trainer.optim.kernel_api import PageUpdate, TorchKernel
from offload_trainer.storage.transfer import DriveFile, Future, Transfers, ending


@contextmanager
def late_transfers(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make transfers of engines and sessions built inside the block late, by the real CUDA device on late streams."""
    devices: list[CudaDevice] = []

    def make_device(*_: Any, **__: Any) -> CudaDevice:
        devices.append(cuda.device(staging_bytes=1 << 20, stagings=2))
        return devices[-1]

    with queued(patch, haste=0.2, seconds=0.001) as cuda, patch.context() as inner:
        inner.setattr("offload_trainer.engine.tiered._device", make_device)
        inner.setattr("offload_trainer.engine.tiered._device_kernel", lambda *_, **__: QueuedKernel(cuda))
        inner.setattr("offload_trainer.engine.tiered.Transfers", lambda **_: LateTransfers())
        yield
    assert set(cuda.bare) <= {device._side.name for device in devices}  # there one wait precedes an update's copies
    assert not cuda.elsewhere


@contextmanager
def late_engine(patch: pytest.MonkeyPatch, model: Path, *words: str, **extra: Any) -> Iterator[TieredEngine]:
    with late_transfers(patch), engine(model, *words, **extra) as ours:
        yield ours


class QueuedKernel:
    """A kernel on the device that queues its work in the current stream."""

    name = "queued"

    def __init__(self, cuda: EmulatedGpu) -> None:
        self._cuda, self._kernel = cuda, TorchKernel()

    def update_page(self, page: PageUpdate) -> None:
        assert self._cuda.stream_now() is not self._cuda.compute
        names, tensors = page.fields.keys(), (*page.fields.values(), page.grad, page.out)

        def update(*aliases: torch.Tensor) -> None:
            *fields, grad, out = aliases
            self._kernel.update_page(replace(page, fields=dict(zip(names, fields, strict=True)), grad=grad, out=out))

        self._cuda.queue("update", update, *tensors)


def late(work: Callable[[], None]) -> Future:
    """Run `work` on a new thread after a random delay."""
    future = Future()
    thread = threading.Timer(random.uniform(0.0005, 0.004), ending(future, work))
    thread.daemon = True
    thread.start()
    return future


class LateTransfers(Transfers):
    """Transfers that complete late and out of order."""

    def read(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        buffer.view(-1).view(torch.uint8).fill_(0xFF)  # Until the bytes arrive, the buffer holds NaN.
        return super().read(file, offset, buffer)

    def _start(self, _: Any, move: Callable[[memoryview, int], None], offset: int, buffer: torch.Tensor) -> Future:
        return late(lambda: move(buffer.view(-1).view(torch.uint8).numpy().data, offset))
