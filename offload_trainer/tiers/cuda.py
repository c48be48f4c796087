"""A CUDA device: copies in on one stream, out on another, ordered by events."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload_trainer.tiers.device import Arrival, Read
from offload_trainer.tiers.memory import host_buffer
from offload_trainer.tiers.transfer import Ticket, Workers, ending


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
        self._downloaded = Workers(1, "downloaded")

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(elements, dtype=dtype, device=self.place)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.place))
        return event

    def fetch(self, source: torch.Tensor | Read, into: torch.Tensor, *, after: torch.cuda.Event | None) -> Arrival:
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

    def download(self, values: torch.Tensor, into: torch.Tensor) -> Ticket:
        self._outward.wait_event(self.mark())
        with torch.cuda.device(self.place), torch.cuda.stream(self._outward):
            into.copy_(values, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
            event.record(self._outward)
        values.record_stream(self._outward)  # its memory is not given to others before the copy is through
        ticket = Ticket()
        self._downloaded.put(ending(ticket, event.synchronize))
        return ticket

    def finish(self) -> None:
        self._outward.synchronize()

    def close(self) -> None:
        self._waiter.close()
        self._downloaded.close()


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
