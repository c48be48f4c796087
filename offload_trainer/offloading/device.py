"""The device that computes, and how bytes reach it and leave it; and the CPU as one (a GPU: `cuda.py`).

    fetch     host memory or a drive -> a ring buffer on the device     (weights, on their way while others compute)
    upload    host memory -> the device                                 (new weights from the update)
    download  the device -> host memory                                 (gradients)
    keep, bring_back   the device -> host memory -> the device          (what gradient checkpointing keeps)
    beside    computing on a stream of its own                          (the update of state that lives on the device)

Copies are ordered by events, and the host waits for none of them while a model runs. The CPU's copies run on a thread,
so that its code takes the same turns; a test makes them late and out of order, and each missing wait shows as a wrong
number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future, Workers, done, ending

Read = Callable[[torch.Tensor], Future]  # fills a host tensor from a drive


class Arrival(Protocol):
    """Something on its way to the device; after `wait` whatever is computed next finds it there."""

    def wait(self) -> None: ...


@dataclass(frozen=True)
class Return:
    """Something on its way back to the device."""

    arrival: Arrival
    left: Future  # what it is copied from may be overwritten


class Device(Protocol):
    place: torch.device
    is_cuda: bool

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a ring, on the device."""
        ...

    def mark(self) -> Any:
        """A point in what the device has been told to compute so far."""
        ...

    def fetch(self, source: torch.Tensor | Read, into: torch.Tensor, *, after: Any) -> Arrival:
        """Fill `into` (on the device) from host memory or by a read, not before the device has passed `after`."""
        ...

    def upload(self, values: torch.Tensor, into: torch.Tensor, *, after: Any) -> Future:
        """Copy host memory to `into` on the device, which may still read that until it has passed `after`."""
        ...

    def download(self, values: torch.Tensor, into: torch.Tensor, *, after: Any = None) -> Future:
        """Copy `values` (on the device), as it is at `after`, or after what was computed so far, to host memory."""
        ...

    def keep(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        """Copy `values` (on the device) to host memory behind what computes; their memory is held until then."""
        ...

    def bring_back(self, source: torch.Tensor, into: torch.Tensor, *, after: Any, ready: Future) -> Return:
        """Fill `into` (on the device) from host memory that is filled once `ready`, not before `after` is passed."""
        ...

    def beside(self, *, after: Any) -> AbstractContextManager[None]:
        """What is computed and copied in here, on any thread, goes on beside the model, not before the device has
        passed `after`, and in the order in which it is told."""
        ...

    def reached(self) -> Future:
        """Done when the device has passed what it was told so far, here or in this `beside`."""
        ...

    def close(self) -> None: ...


class CpuDevice:
    """The CPU computes, and its memory stands for the device's."""

    place, is_cuda = torch.device("cpu"), False

    def __init__(self) -> None:
        self._copies = Workers(1, "copy")

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return host_buffer(elements * dtype.itemsize).view(dtype)

    def mark(self) -> None:
        return None  # what the CPU was told it has done

    def fetch(self, source: torch.Tensor | Read, into: torch.Tensor, *, after: Any) -> Arrival:
        if not isinstance(source, torch.Tensor):
            return source(into)
        return self.upload(source, into, after=after)

    def upload(self, values: torch.Tensor, into: torch.Tensor, *, after: Any) -> Future:
        future = Future()
        self._copies.put(ending(future, lambda: copy_alone(values, into)))
        return future

    def keep(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        held, future = [values], Future()
        self._copies.put(ending(future, lambda: copy_alone(held.pop(), into)))  # let go of before the future is done
        return future

    def bring_back(self, source: torch.Tensor, into: torch.Tensor, *, after: Any, ready: Future) -> Return:
        future, copy = Future(), lambda: copy_alone(source, into)
        ready.then(lambda error: future.finish_part(error) if error else self._copies.put(ending(future, copy)))
        return Return(future, future)

    def download(self, values: torch.Tensor, into: torch.Tensor, *, after: Any = None) -> Future:
        into.copy_(values)
        return done()

    def beside(self, *, after: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def reached(self) -> Future:
        return done()

    def close(self) -> None:
        self._copies.close()


def copy_alone(values: torch.Tensor, into: torch.Tensor) -> None:
    """By one thread: torch's copy would start a team of its own beside the one that computes."""
    assert values.dtype is into.dtype
    assert values.numel() == into.numel()
    assert values.is_contiguous()
    assert into.is_contiguous()
    ctypes.memmove(into.data_ptr(), values.data_ptr(), values.nbytes)
