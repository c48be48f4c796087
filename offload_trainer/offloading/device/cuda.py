"""A CUDA device: streams for the copies each way and for the update of its pages, ordered by events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload_trainer.offloading.device.base import DeviceCopy, Read, ReturnCopy
from offload_trainer.offloading.ranks.weight_all_gather import PendingGather
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future, Workers, ending


class _Staging:
    """Pinned memory between a drive and the device."""

    def __init__(self, size: int) -> None:
        self.buffer = host_buffer(size, pinned=True)
        self.last: _CudaArrival | None = None  # what it was last used for


class CudaDevice:
    """Copies in on one stream, out on another. Reads from a drive go through pinned memory of their own.

    Activations kept elsewhere have two streams more, so that they wait for no weights.
    """

    is_cuda = True

    def __init__(self, device: torch.device, *, staging_bytes: int, stagings: int) -> None:
        """`stagings` pinned buffers of `staging_bytes`, for units that come from a drive; 0 where none does."""
        self.place = device
        self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._keeping, self._returning = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._beside = torch.cuda.Stream(device)
        self._stagings = [_Staging(staging_bytes) for _ in range(stagings if staging_bytes else 0)]
        self._lock = threading.Lock()
        self._waiter, self._stager, self._passed, self._downloaded = map(
            self._worker, ("event", "staging", "passed", "downloaded")
        )

    def _worker(self, name: str) -> Workers:
        """A thread for this device: a new one has device 0, and what it asks CUDA may open a context there."""
        return Workers(1, name, prepare=lambda: torch.cuda.set_device(self.place))

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(elements, dtype=dtype, device=self.place)

    def mark(self) -> torch.cuda.Event:
        with torch.cuda.device(self.place):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.place))
        return event

    def fetch(self, source: torch.Tensor | Read, into: torch.Tensor, *, after: torch.cuda.Event | None) -> DeviceCopy:
        if isinstance(source, torch.Tensor):
            return self._arrive(self._inward, None, source, into, after=after)
        if isinstance(source, PendingGather):
            return self._gathered(source, into, after=after)
        with self._lock:  # who computes fetches, and whoever saw new weights come home
            staging = self._stagings.pop(0)  # the one used longest ago is first
            self._stagings.append(staging)
            part = staging.buffer[: into.numel() * into.element_size()].view(into.dtype)
            before, read = staging.last, Future()
            arrival = staging.last = self._arrive(self._inward, read, part, into, after=after)

        def fill() -> None:
            try:
                if before is not None:
                    before.finish()  # the drive must not overwrite what is still to be copied
                source(part).then(read.finish_part)
            except BaseException as error:
                read.finish_part(error)

        if before is None or before.over:
            fill()
        else:
            self._stager.put(fill)
        return arrival

    def _gathered(self, gather: PendingGather, into: torch.Tensor, *, after: torch.cuda.Event | None) -> _CudaArrival:
        """Queued at this rank's turn, by the thread that gathers: its part's copy, and NCCL's all-gather behind it."""

        def queue() -> torch.cuda.Event:
            with self._in_order(self._inward, after=after) as event:
                gather.fill(into, lambda values, target: target.copy_(values, non_blocking=True))
            return event

        arrival = _CudaArrival(queue, self.place)
        gather.when(arrival.queue)
        return arrival

    @contextmanager
    def _in_order(self, stream: torch.cuda.Stream, *, after: torch.cuda.Event | None) -> Iterator[torch.cuda.Event]:
        """What is told in here goes on `stream`, once the device has passed `after`; the event is passed behind it."""
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        with torch.cuda.device(self.place), torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            yield event
            event.record(stream)

    def _arrive(
        self,
        stream: torch.cuda.Stream,
        ready: Future | None,
        source: torch.Tensor,
        into: torch.Tensor,
        *,
        after: torch.cuda.Event | None,
    ) -> _CudaArrival:
        """A copy that is queued now, or as soon as `ready`, by the thread that saw it."""
        arrival = _CudaArrival(lambda: self._copy_in(source, into, after=after, stream=stream), self.place)
        if ready is None:
            arrival.queue(None)
        else:
            ready.then(arrival.queue)
        return arrival

    def _copy_in(
        self, source: torch.Tensor, into: torch.Tensor, *, after: torch.cuda.Event | None, stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        with self._in_order(stream, after=after) as event:
            into.copy_(source, non_blocking=True)
        return event

    def upload(self, values: torch.Tensor, into: torch.Tensor, *, after: torch.cuda.Event | None) -> Future:
        event, future = self._copy_in(values, into, after=after, stream=self._inward), Future()
        self._waiter.put(ending(future, event.synchronize))
        return future

    def download(self, values: torch.Tensor, into: torch.Tensor, *, after: torch.cuda.Event | None = None) -> Future:
        after = after or self.mark()
        return self._copy_out(values, into, after=after, stream=self._outward, waiter=self._downloaded)

    def _copy_out(
        self,
        values: torch.Tensor,
        into: torch.Tensor,
        *,
        after: torch.cuda.Event,
        stream: torch.cuda.Stream,
        waiter: Workers,
    ) -> Future:
        with torch.cuda.device(self.place), torch.cuda.stream(stream):
            stream.wait_event(after)
            into.copy_(values, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
            event.record(stream)
        values.record_stream(stream)  # its memory is not given to others before the copy is through
        future = Future()
        waiter.put(ending(future, event.synchronize))
        return future

    def keep(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        return self._copy_out(values, into, after=self.mark(), stream=self._keeping, waiter=self._waiter)

    def copy_back(
        self, source: torch.Tensor, into: torch.Tensor, *, after: torch.cuda.Event | None, ready: Future
    ) -> ReturnCopy:
        arrival, left = self._arrive(self._returning, ready, source, into, after=after), Future()
        into.record_stream(self._returning)  # where it is dropped before it was waited for
        arrival.queued.then(lambda _: self._waiter.put(ending(left, arrival.finish)))
        return ReturnCopy(arrival, left)

    @contextmanager
    def beside(self, *, after: torch.cuda.Event | None) -> Iterator[None]:
        with torch.cuda.device(self.place), torch.cuda.stream(self._beside):
            if after is not None:
                self._beside.wait_event(after)
            yield

    def reached(self) -> Future:
        event, future = torch.cuda.Event(blocking=True), Future()  # who waits for it sleeps
        with torch.cuda.device(self.place):
            event.record(torch.cuda.current_stream(self.place))
        self._passed.put(ending(future, event.synchronize))
        return future

    def close(self) -> None:
        for workers in (self._stager, self._waiter, self._downloaded, self._passed):
            workers.close()
        self._stagings.clear()  # with the last view of it CUDA lets go of pinned memory


class _CudaArrival:
    """A copy to the device. It is queued once its bytes are in host memory."""

    def __init__(self, copy: Callable[[], torch.cuda.Event], place: torch.device) -> None:
        """`copy` queues it on the device at `place`; any thread may then ask for it."""
        self._copy, self._place = copy, place
        self._event: torch.cuda.Event | None = None
        self.queued = Future()  # with what went wrong before

    def queue(self, error: BaseException | None) -> None:
        """Its bytes are in host memory, or could not be brought there."""
        if error is None:
            try:
                self._event = self._copy()
            except BaseException as caught:
                error = caught
        self.queued.finish_part(error)

    @property
    def over(self) -> bool:
        """Whether the bytes are on the device."""
        with torch.cuda.device(self._place):
            return self._event is not None and self._event.query()

    def wait(self) -> None:
        self.queued.wait()
        assert self._event is not None
        with torch.cuda.device(self._place):
            torch.cuda.current_stream(self._place).wait_event(self._event)

    def finish(self) -> None:
        """The bytes are on the device when this returns."""
        self.queued.wait()
        assert self._event is not None
        with torch.cuda.device(self._place):
            self._event.synchronize()
