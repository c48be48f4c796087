"""Implement `Device` for CUDA: side streams for copies in each direction and for the update, ordered by events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload_trainer.offloading.device import DeviceCopy, QueuedFill, Read, ReturnCopy
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future, Workers, ending


class _Staging:
    """A pinned host buffer between a drive and the device."""

    def __init__(self, size: int) -> None:
        self.buffer = host_buffer(size, pinned=True)
        self.last: _CudaArrival | None = None  # the buffer's last copy to the device


class CudaDevice:
    """A CUDA device with one stream for copies to the device and one for copies to the host.

    Reads from a drive pass through pinned staging buffers. Offloaded activations use two more streams, so that they do
    not wait for weights. The update of pages on the device uses another one.
    """

    is_cuda, in_host_memory = True, False

    def __init__(self, device: torch.device, *, staging_bytes: int, stagings: int) -> None:
        """Create streams and threads, and `stagings` pinned buffers of `staging_bytes` for units on drives.

        `staging_bytes` is 0 if no weights are on a drive.
        """
        self.place = device
        self._to_device, self._to_host = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._inputs_to_host, self._inputs_to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._side = torch.cuda.Stream(device)
        self._stagings = [_Staging(staging_bytes) for _ in range(stagings if staging_bytes else 0)]
        self._lock = threading.Lock()
        # One thread waits for the events of one stream, which are reached in order.
        self._uploaded, self._downloaded, self._kept, self._returned, self._passed, self._stager = map(
            self._worker, ("uploaded", "downloaded", "kept", "returned", "passed", "staging")
        )

    def _worker(self, name: str) -> Workers:
        """Start a thread that uses this device. A new thread uses device 0 and could create a CUDA context there."""
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
            return self._arrive(self._to_device, None, source, into, after=after)
        if isinstance(source, QueuedFill):
            return self._gathered(source, into, after=after)
        with self._lock:  # the training thread fetches, and so does a thread that completes an update's writes
            staging = self._stagings.pop(0)  # the least recently used buffer is first
            self._stagings.append(staging)
            part = staging.buffer[: into.numel() * into.element_size()].view(into.dtype)
            before, read = staging.last, Future()
            arrival = staging.last = self._arrive(self._to_device, read, part, into, after=after)

        def fill() -> None:
            try:
                if before is not None:
                    before.finish()  # the read must not overwrite bytes that are still being copied
                source(part).then(read.finish_part)
            except BaseException as error:
                read.finish_part(error)

        if before is None or before.over:
            fill()
        else:
            self._stager.put(fill)
        return arrival

    def _gathered(self, gather: QueuedFill, into: torch.Tensor, *, after: torch.cuda.Event | None) -> _CudaArrival:
        """Queue the copy of this rank's shard and NCCL's all-gather, on the gathering thread at this rank's turn."""

        def queue() -> torch.cuda.Event:
            with self._in_order(self._to_device, after=after) as event:
                gather.fill(into, lambda values, target: target.copy_(values, non_blocking=True))
            return event

        arrival = _CudaArrival(queue, self.place)
        gather.when(arrival.queue)
        return arrival

    @contextmanager
    def _in_order(self, stream: torch.cuda.Stream, *, after: torch.cuda.Event | None) -> Iterator[torch.cuda.Event]:
        """Queue the work inside the context on `stream` after the event `after`; yield an event recorded at its end."""
        event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
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
        """Return a copy to the device, queued now, or on the completing thread when `ready` completes."""
        arrival = _CudaArrival(lambda: self._copy(source, into, after=after, stream=stream), self.place)
        if ready is None:
            arrival.queue(None)
        else:
            ready.then(arrival.queue)
        return arrival

    def _copy(
        self, source: torch.Tensor, into: torch.Tensor, *, after: torch.cuda.Event | None, stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        with self._in_order(stream, after=after) as event:
            into.copy_(source, non_blocking=True)
        return event

    def upload(self, values: torch.Tensor, into: torch.Tensor, *, after: torch.cuda.Event | None) -> Future:
        event, future = self._copy(values, into, after=after, stream=self._to_device), Future()
        self._uploaded.put(ending(future, event.synchronize))
        return future

    def download(self, values: torch.Tensor, into: torch.Tensor, *, after: torch.cuda.Event | None = None) -> Future:
        after = after or self.mark()
        return self._copy_out(values, into, after=after, stream=self._to_host, waiter=self._downloaded)

    def _copy_out(
        self,
        values: torch.Tensor,
        into: torch.Tensor,
        *,
        after: torch.cuda.Event,
        stream: torch.cuda.Stream,
        waiter: Workers,
    ) -> Future:
        event, future = self._copy(values, into, after=after, stream=stream), Future()
        values.record_stream(stream)  # the allocator must not reuse the memory before the copy is done
        waiter.put(ending(future, event.synchronize))
        return future

    def keep(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        return self._copy_out(values, into, after=self.mark(), stream=self._inputs_to_host, waiter=self._kept)

    def copy_back(
        self, source: torch.Tensor, into: torch.Tensor, *, after: torch.cuda.Event | None, ready: Future
    ) -> ReturnCopy:
        arrival, left = self._arrive(self._inputs_to_device, ready, source, into, after=after), Future()
        into.record_stream(self._inputs_to_device)  # `into` may be dropped without a wait for the copy
        arrival.queued.then(lambda _: self._returned.put(ending(left, arrival.finish)))
        return ReturnCopy(arrival, left)

    @contextmanager
    def side_stream(self, *, after: torch.cuda.Event | None) -> Iterator[None]:
        with torch.cuda.device(self.place), torch.cuda.stream(self._side):
            if after is not None:
                self._side.wait_event(after)
            yield

    def reached(self) -> Future:
        event, future = torch.cuda.Event(blocking=True), Future()  # a waiting thread sleeps
        with torch.cuda.device(self.place):
            event.record(torch.cuda.current_stream(self.place))
        self._passed.put(ending(future, event.synchronize))
        return future

    def close(self) -> None:
        waiters = self._uploaded, self._downloaded, self._kept, self._returned, self._passed
        for workers in (self._stager, *waiters):
            workers.close()
        self._stagings.clear()  # pinned memory is released with its last view


class _CudaArrival:
    """A copy to the device that is queued on a stream once its source bytes are in host memory."""

    def __init__(self, copy: Callable[[], torch.cuda.Event], place: torch.device) -> None:
        """Prepare a copy; any thread may call `copy`, which queues it on the device `place` and returns its event."""
        self._copy, self._place = copy, place
        self._event: torch.cuda.Event | None = None
        self.queued = Future()  # completes when the copy is queued, or with an earlier error

    def queue(self, error: BaseException | None) -> None:
        """Queue the copy, because its bytes are in host memory, or fail it with the `error` of reading them."""
        if error is None:
            try:
                self._event = self._copy()
            except BaseException as caught:
                error = caught
        self.queued.finish_part(error)

    @property
    def over(self) -> bool:
        """Return whether the copy has completed on the device."""
        with torch.cuda.device(self._place):
            return self._event is not None and self._event.query()

    def wait(self) -> None:
        """Make the current stream wait for the copy, after it has been queued."""
        self.queued.wait()
        assert self._event is not None
        with torch.cuda.device(self._place):
            torch.cuda.current_stream(self._place).wait_event(self._event)

    def finish(self) -> None:
        """Block until the bytes are on the device."""
        self.queued.wait()
        assert self._event is not None
        with torch.cuda.device(self._place):
            self._event.synchronize()
