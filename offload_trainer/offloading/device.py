"""The computing device, a CPU or a GPU, and its asynchronous copies, which are ordered by events.

While a model runs on a GPU, the host waits only until a copy that it needs is queued, and where callers limit the bytes
in flight. A CPU's copies, except `download`, run on a thread: tests delay and reorder them, so that each missing wait
shows as a wrong number.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future, Workers, done, followed

Read = Callable[[torch.Tensor], Future]  # fills a host tensor from a drive
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]  # pairs of source and destination
Mark = torch.cuda.Event | None  # an event after what was queued on the device by then; on a CPU None
Copy = Callable[[torch.Tensor, torch.Tensor], object]  # host memory, and where on the device it goes
_When = Callable[[Callable[[], object]], Future]  # runs a function later; the future ends with it, or with an error


@dataclass(frozen=True)
class QueuedFill:
    """A `Read` that a GPU may also queue on a separate stream: an all-gather between the devices of several ranks."""

    at_turn: _When  # runs a function once, on a thread, when it is this rank's turn to `fill`
    fill: Callable[[torch.Tensor, Copy], None]  # fills memory of the device, or queues that

    def __call__(self, into: torch.Tensor) -> Future:
        return self.at_turn(lambda: self.fill(into, copy_alone))


class DeviceCopy(Protocol):
    """A copy to the device. Computations that are queued after `wait` see the copied data."""

    def wait(self) -> None: ...


class CpuDevice:
    """The CPU as the device that computes forward and backward; its memory is host memory."""

    torch_device, is_cuda = torch.device("cpu"), False
    in_host_memory = True  # the host may use the device's tensors without a copy

    def __init__(self) -> None:
        self._copies = Workers(1, "copy")

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory on the device."""
        return host_buffer(elements * dtype.itemsize).view(dtype)

    def mark(self) -> Mark:
        """Return an event after everything that is queued on the device so far."""
        return None  # the CPU computes synchronously

    def fetch(self, source: torch.Tensor | Read, into: torch.Tensor, *, after: Mark) -> DeviceCopy:
        """Fill `into` (on the device) from host memory or by a read, after the event `after`."""
        return self.upload(source, into, after=after) if isinstance(source, torch.Tensor) else source(into)

    def upload(self, values: torch.Tensor, into: torch.Tensor, *, after: Mark) -> Future:
        """Copy host memory to `into` on the device, which may still use its old contents until the event `after`."""
        return self._copies.submit(lambda: copy_alone(values, into))

    def keep(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        """Copy `values` (on the device) to host memory concurrently, and keep them alive until it is done."""
        held = [values]
        return self._copies.submit(lambda: copy_alone(held.pop(), into))  # freed before the future completes

    def copy_back(
        self, source: torch.Tensor, into: torch.Tensor, *, after: Mark, ready: Future
    ) -> tuple[DeviceCopy, Future]:
        """Fill `into` (on the device) after the event `after`, when `source` is `ready`; the future frees `source`."""
        copied = followed(ready, lambda: self._copies.submit(lambda: copy_alone(source, into)))
        return copied, copied

    def download(self, copies: Copies, *, after: Mark = None) -> Future:
        """Copy tensors on the device to host memory after the event `after`, or after everything queued so far."""
        for values, into in copies:
            into.copy_(values)
        return done()

    def side_stream(self, *, after: Mark) -> AbstractContextManager[None]:
        """Queue the work inside the context on a side stream, after the event `after`, in order, from any thread."""
        return nullcontext()

    def reached(self) -> Future:
        """Return a future that completes after everything queued so far, on the main or the current side stream."""
        return done()

    def close(self) -> None:
        self._copies.close()


class CudaDevice:
    """A CUDA device, with the methods of `CpuDevice` and a stream for each kind of copy and the update of its pages.

    Reads from a drive pass through pinned staging buffers.
    """

    is_cuda, in_host_memory = True, False

    def __init__(self, device: torch.device, *, staging_bytes: int, stagings: int) -> None:
        """Create streams, threads, and `stagings` pinned buffers of `staging_bytes` (0: no weights on a drive)."""
        self.torch_device = device
        self._to_device, self._to_host = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._inputs_to_host, self._inputs_to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._side = torch.cuda.Stream(device)
        # Pinned buffers, each with its last copy to the device; the least recently used is first.
        self._stagings = deque[tuple[torch.Tensor, _CudaArrival | None]](
            (host_buffer(staging_bytes, pinned=True), None) for _ in range(stagings if staging_bytes else 0)
        )
        self._lock = threading.Lock()
        # One thread waits for the events of one stream, which are reached in order.
        self._uploaded, self._downloaded, self._kept, self._returned, self._passed = map(
            self._worker, ("uploaded", "downloaded", "kept", "returned", "passed")
        )

    def _worker(self, name: str) -> Workers:
        """Start a thread that uses this device. A new thread uses device 0 and could create a CUDA context there."""
        thread = Workers(1, name)
        thread.submit(lambda: torch.cuda.set_device(self.torch_device)).wait()
        return thread

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(elements, dtype=dtype, device=self.torch_device)

    def mark(self) -> torch.cuda.Event:
        with torch.cuda.device(self.torch_device):
            event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
            event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def fetch(self, source: torch.Tensor | Read, into: torch.Tensor, *, after: Mark) -> DeviceCopy:
        if isinstance(source, torch.Tensor):
            return self._arrive(self._to_device, source, into, after=after, ready=done())
        if isinstance(source, QueuedFill):  # this rank's shard and NCCL's all-gather, at this rank's turn
            copy = lambda values, target: target.copy_(values, non_blocking=True)  # noqa: E731
            queue = partial(self._queue, self._to_device, lambda: source.fill(into, copy), after=after)
            return _CudaArrival(queue, self.torch_device, when=source.at_turn)
        with self._lock:  # the training thread fetches, and so does a thread that completes an update's writes
            staging, last = self._stagings.popleft()
            part, read = staging[: into.nbytes].view(into.dtype), Future()
            arrival = self._arrive(self._to_device, part, into, after=after, ready=read)
            self._stagings.append((staging, arrival))
        free = done()
        if last is not None and not last.over:  # the read must not overwrite bytes that are still being copied
            free = followed(last.queued, partial(self._uploaded.submit, last.finish))
        followed(free, lambda: source(part)).then(read.finish_part)
        return arrival

    def _arrive(
        self, stream: torch.cuda.Stream, source: torch.Tensor, into: torch.Tensor, *, after: Mark, ready: Future
    ) -> _CudaArrival:
        """Return a copy to the device, queued when `ready` completes: now, or on the completing thread."""
        copy = partial(into.copy_, source, non_blocking=True)
        queue, when = partial(self._queue, stream, copy, after=after), partial(followed, ready)
        return _CudaArrival(queue, self.torch_device, when=when)

    def _queue(self, stream: torch.cuda.Stream, work: Callable[[], object], *, after: Mark) -> torch.cuda.Event:
        """Queue `work` on `stream` after the event `after`; return an event recorded at its end."""
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            work()
            return self.mark()

    def upload(self, values: torch.Tensor, into: torch.Tensor, *, after: Mark) -> Future:
        return self._uploaded.submit(self._arrive(self._to_device, values, into, after=after, ready=done()).finish)

    def download(self, copies: Copies, *, after: Mark = None) -> Future:
        return self._copy_out(copies, after=after or self.mark(), stream=self._to_host, waiter=self._downloaded)

    def _copy_out(self, copies: Copies, *, after: Mark, stream: torch.cuda.Stream, waiter: Workers) -> Future:
        def copy() -> None:
            for values, into in copies:
                into.copy_(values, non_blocking=True)
                values.record_stream(stream)  # the allocator must not reuse the memory before the copy is done

        return waiter.submit(self._queue(stream, copy, after=after).synchronize)

    def keep(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        return self._copy_out([(values, into)], after=self.mark(), stream=self._inputs_to_host, waiter=self._kept)

    def copy_back(
        self, source: torch.Tensor, into: torch.Tensor, *, after: Mark, ready: Future
    ) -> tuple[DeviceCopy, Future]:
        arrival = self._arrive(self._inputs_to_device, source, into, after=after, ready=ready)
        into.record_stream(self._inputs_to_device)  # `into` may be dropped without a wait for the copy
        return arrival, followed(arrival.queued, lambda: self._returned.submit(arrival.finish))

    @contextmanager
    def side_stream(self, *, after: Mark) -> Iterator[None]:
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._side):
            if after is not None:
                self._side.wait_event(after)
            yield

    def reached(self) -> Future:
        return self._passed.submit(self.mark().synchronize)

    def close(self) -> None:
        for workers in (self._uploaded, self._downloaded, self._kept, self._returned, self._passed):
            workers.close()
        self._stagings.clear()  # pinned memory is released with its last view


class _CudaArrival:
    """A copy to the device that is queued on a stream once its source bytes are in host memory."""

    def __init__(self, copy: Callable[[], torch.cuda.Event], device: torch.device, *, when: _When) -> None:
        """Let `when` run `copy`, which queues the copy and returns its event, once the bytes are in host memory."""
        self._copy, self._device = copy, device  # the tensors of the copy stay as long as this object
        self._event: torch.cuda.Event | None = None

        def queue() -> None:
            self._event = self._copy()

        self.queued = when(queue)  # completes when the copy is queued, or with an earlier error

    @property
    def over(self) -> bool:
        """Return whether the copy has completed on the device."""
        with torch.cuda.device(self._device):
            return self._event is not None and self._event.query()

    def wait(self) -> None:
        """Make the current stream wait for the copy, after it has been queued."""
        self.queued.wait()
        assert self._event is not None
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        """Block until the bytes are on the device."""
        self.queued.wait()
        assert self._event is not None
        with torch.cuda.device(self._device):
            self._event.synchronize()


Device = CpuDevice | CudaDevice


def copy_alone(values: torch.Tensor, into: torch.Tensor) -> None:
    """Copy with one thread. torch's copy would start a second thread team that competes with the computation."""
    assert values.dtype is into.dtype
    assert values.numel() == into.numel()
    assert values.is_contiguous()
    assert into.is_contiguous()
    ctypes.memmove(into.data_ptr(), values.data_ptr(), values.nbytes)


def cores_beside(device: Device) -> int:
    """Return the number of cores for host work while the device computes the model.

    On a CPU those are all: with fewer, the threads of a product would get unequal parts of the cores, and wait.
    """
    return max(1, torch.get_num_threads() - 2) if device.is_cuda else torch.get_num_threads()  # two launch kernels


def limit_cores(thread: Workers, cores: int) -> None:
    """Let torch and the compiled kernels use `cores` cores on this thread, and leave all other threads as they are."""
    threads = torch.get_num_threads()

    def take() -> None:
        torch.get_num_threads()  # makes torch initialise this thread first; otherwise it would overwrite the next line
        torch.set_num_threads(cores)

    thread.submit(take).wait()
    torch.set_num_threads(threads)  # also sets the default for new threads
