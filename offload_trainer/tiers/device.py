"""The device that computes, and how bytes reach it and leave it: a CUDA device with streams of its own, or the CPU.

    fetch     host memory or a drive -> a ring buffer on the device     (weights, on their way while others compute)
    upload    host memory -> the device                                 (new weights from the update)
    download  the device -> host memory                                 (gradients)

Copies are ordered by events, and the host waits for none of them while a model runs. The CPU's copies run on a thread,
so that its code takes the same turns; a test makes them late and out of order, and each missing wait shows as a wrong
number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import torch

from offload_trainer.tiers.memory import host_buffer
from offload_trainer.tiers.transfer import Ticket, Workers, ending

Read = Callable[[torch.Tensor], Ticket]  # fills a host tensor from a drive


class Arrival(Protocol):
    """Something on its way to the device; after `wait` whatever is computed next finds it there."""

    def wait(self) -> None: ...


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

    def upload(self, values: torch.Tensor, into: torch.Tensor) -> Ticket: ...

    def download(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Copy `values` (on the device) to host memory, in place once `finish` returns."""
        ...

    def finish(self) -> None:
        """Wait for all downloads."""
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
        return self.upload(source, into)

    def upload(self, values: torch.Tensor, into: torch.Tensor) -> Ticket:
        ticket = Ticket()
        self._copies.put(ending(ticket, lambda: _copy(values, into)))
        return ticket

    def download(self, values: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(values)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._copies.close()


def _copy(values: torch.Tensor, into: torch.Tensor) -> None:
    """By one thread: torch's copy would start a team of its own beside the one that computes."""
    assert values.dtype is into.dtype
    assert values.numel() == into.numel()
    assert values.is_contiguous()
    assert into.is_contiguous()
    ctypes.memmove(into.data_ptr(), values.data_ptr(), values.nbytes)


class CudaDevice:
    """Copies in on one stream, out on another. Reads from a drive go through pinned memory of their own."""

    is_cuda = True

    def __init__(self, device: torch.device, *, staging_bytes: int, stagings: int) -> None:
        """`stagings` pinned buffers of `staging_bytes`, for units that come from a drive; 0 where none does."""
        self.place = device
        self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._stagings = [host_buffer(staging_bytes, pinned=True) for _ in range(stagings if staging_bytes else 0)]
        self._through: list[_CudaArrival | None] = [None] * len(self._stagings)  # what each was last used for
        self._next = 0
        self._waiter = Workers(1, "event")

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(elements, dtype=dtype, device=self.place)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.place))
        return event

    def fetch(self, source: torch.Tensor | Read, into: torch.Tensor, *, after: Any) -> Arrival:
        if isinstance(source, torch.Tensor):
            event = self._copy_in(source, into, after=after)
            return _CudaArrival(None, lambda: event)
        place = self._next
        self._next = (place + 1) % len(self._stagings)
        through = self._through[place]
        if through is not None:
            through.finish()  # the drive must not overwrite what is still to be copied; that was units ago
        staging = self._stagings[place][: into.numel() * into.element_size()].view(into.dtype)
        arrival = _CudaArrival(source(staging), lambda: self._copy_in(staging, into, after=after))
        self._through[place] = arrival
        return arrival

    def _copy_in(self, source: torch.Tensor, into: torch.Tensor, *, after: torch.cuda.Event | None) -> torch.cuda.Event:
        with torch.cuda.device(self.place), torch.cuda.stream(self._inward):
            if after is not None:
                self._inward.wait_event(after)
            into.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._inward)
        return event

    def upload(self, values: torch.Tensor, into: torch.Tensor) -> Ticket:
        event, ticket = self._copy_in(values, into, after=None), Ticket()
        self._waiter.put(ending(ticket, event.synchronize))
        return ticket

    def download(self, values: torch.Tensor, into: torch.Tensor) -> None:
        self._outward.wait_event(self.mark())
        with torch.cuda.device(self.place), torch.cuda.stream(self._outward):
            into.copy_(values, non_blocking=True)
        values.record_stream(self._outward)  # its memory is not given to others before the copy is through

    def finish(self) -> None:
        self._outward.synchronize()

    def close(self) -> None:
        self._waiter.close()


class _CudaArrival:
    """A copy to the device, and the read that it follows, if any."""

    def __init__(self, read: Ticket | None, copy: Callable[[], torch.cuda.Event]) -> None:
        self._read, self._copy = read, copy
        self._event: torch.cuda.Event | None = None

    def _copied(self) -> torch.cuda.Event:
        """The copy's event; the first time, once the bytes are in host memory."""
        if self._event is None:
            if self._read is not None:
                self._read.wait()
            self._event = self._copy()
        return self._event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._copied())

    def finish(self) -> None:
        """The bytes are on the device when this returns."""
        self._copied().synchronize()
