"""Engines whose copies, reads and writes complete late: on stand-ins for device and drive, or on fake CUDA streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import EmulatedGpu, queued
from engine_bench import engine
from late_transfers import LateDevice, LateTransfers

from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.optim.kernel_api import PageUpdate, TorchKernel


def use_late_transfers(patch: pytest.MonkeyPatch) -> None:
    """Make reads and writes of engines that are built from now on complete late and out of order."""
    patch.setattr("offload_trainer.engine.tiered.Transfers", lambda **_: LateTransfers())


@contextmanager
def late_engine(patch: pytest.MonkeyPatch, model: Path, *words: str, **extra: Any) -> Iterator[TieredEngine]:
    """Yield the engine with reads, writes and copies to and from the device that complete late and out of order."""
    use_late_transfers(patch)
    with engine(model, *words, device=LateDevice(), **extra) as ours:
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


@contextmanager
def engine_on_streams(patch: pytest.MonkeyPatch, model: Path, *words: str, **extra: Any) -> Iterator[TieredEngine]:
    """Yield the engine on the real CUDA device with simulated streams that run late, and a kernel that does too."""
    with queued(patch, haste=0.2) as cuda:
        late = lambda layout, device, kernel, say: QueuedKernel(cuda)  # noqa: E731
        patch.setattr("offload_trainer.engine.tiered._device_kernel", late)
        device = cuda.device(staging_bytes=1 << 20, stagings=2)
        with engine(model, *words, device=device, **extra) as ours:
            yield ours
        assert set(cuda.bare) <= {device._side.name}  # where an update's copies follow one wait
        assert not cuda.elsewhere
