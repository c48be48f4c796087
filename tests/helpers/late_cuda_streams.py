"""A stand-in for CUDA's streams and events under the real `CudaDevice`: queued work runs late, or when it is waited
for.

    with queued(monkeypatch) as cuda:  engine(..., device=cuda.device(staging_bytes=..., stagings=2))

Copies with `non_blocking` inside `torch.cuda.stream(...)` go to that stream's queue; an event is a position in a queue.
The CPU computes immediately, so the compute stream has no queue, and whatever it waits for runs at that point. All
other work runs at random times, in the order of its queue, and never before what it waits for. So a missing wait
shows up as a wrong number, and `log` lists the work in the order in which it ran. One error does not show up that way:
a copy that overwrites what a kernel still reads. Such a copy must be queued behind an event of the compute stream;
`bare` lists the copies that are not.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offload_trainer.offloading.device import CudaDevice
from offload_trainer.storage import host_memory


class FakeCuda:
    """All fake streams, and a log of the order in which their work ran."""

    def __init__(self, *, seed: int = 0, haste: float = 0.1) -> None:
        """Create the streams; `haste` is the probability that a queue advances at each call."""
        self.log: list[str] = []
        self.lock = threading.RLock()
        self.current = threading.local()
        self.streams: list[FakeStream] = []
        self.compute = FakeStream(self, "compute")
        self.bare: list[str] = []  # copies queued without a preceding wait for the compute stream
        self.elsewhere: set[str] = set()  # threads, except this one, that called CUDA without setting a device
        self.host_waits = 0  # waits of the training thread
        self._thread = threading.current_thread()
        self.recorded: set[int] = set()  # addresses of tensors passed to `record_stream`
        self._random, self._haste = random.Random(seed), haste

    def device(self, *, staging_bytes: int = 0, stagings: int = 0) -> CudaDevice:
        return CudaDevice(torch.device("cpu"), staging_bytes=staging_bytes, stagings=stagings)

    def stream_now(self) -> FakeStream:
        return getattr(self.current, "stream", self.compute)

    def note_device(self) -> None:
        """Record a calling thread that has not set a device, since CUDA would use device 0 for it."""
        thread = threading.current_thread()
        if thread is not self._thread and getattr(self.current, "device", None) is None:
            self.elsewhere.add(thread.name)

    def note_host_wait(self) -> None:
        """Count a wait of the training thread for the device."""
        self.host_waits += threading.current_thread() is self._thread

    def put(self, stream: FakeStream, kind: str, work: Any) -> None:
        self.note_device()
        with self.lock:
            if stream is self.compute:
                self.carry_out(stream, kind, work)
                return
            stream.queue.append((kind, work))
            # The mark is per thread: work that another thread queues between a wait and its copy does not undo the
            # wait.
            if kind == "copy" and getattr(self.current, "behind_compute", None) is not stream:
                self.bare.append(stream.name)
            self.current.behind_compute = stream if kind == "wait" and work.stream is self.compute else None
            for one in self.streams:
                while one.queue and self._random.random() < self._haste and self._may_move(one):
                    self.carry_out(one, *one.queue.popleft())

    def _may_move(self, stream: FakeStream) -> bool:
        kind, work = stream.queue[0]
        return kind != "wait" or work.done

    def carry_out(self, stream: FakeStream, kind: str, work: Any) -> None:
        if kind == "wait":
            self.run_until(work)
        elif kind == "record":
            work.done = True
        else:
            self.log.append(f"{stream.name} {kind}")
            work()

    def run_until(self, event: FakeEvent) -> None:
        """Run the queued work that precedes the event, and nothing more."""
        with self.lock:
            while event.stream is not None and not event.done:
                self.carry_out(event.stream, *event.stream.queue.popleft())


class FakeStream:
    """A stand-in for torch.cuda.Stream."""

    def __init__(self, cuda: FakeCuda, name: str = "") -> None:
        self.cuda, self.queue = cuda, deque[tuple[str, Any]]()
        self.name = name or f"stream {len(cuda.streams)}"
        cuda.streams.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.put(self, "wait", event)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self.cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.note_host_wait()
        self.cuda.run_until(self.record_event())


class FakeEvent:
    """A stand-in for torch.cuda.Event."""

    def __init__(self, cuda: FakeCuda, **_: Any) -> None:
        self.cuda, self.done = cuda, False
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream, self.done = stream or self.cuda.stream_now(), False
        self.cuda.put(self.stream, "record", self)

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self.cuda.stream_now()).wait_event(self)

    def query(self) -> bool:
        self.cuda.note_device()
        return self.done or self.stream is None

    def synchronize(self) -> None:
        self.cuda.note_device()
        self.cuda.note_host_wait()
        self.cuda.run_until(self)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.done or self.stream is None
        assert end.done or end.stream is None
        return 0.0


@contextmanager
def queued(patch: pytest.MonkeyPatch, *, seed: int = 0, haste: float = 0.1) -> Iterator[FakeCuda]:
    """Replace torch's CUDA streams, events and asynchronous copies with the stand-in inside the block."""
    if torch.cuda.is_available():
        pytest.skip("the stand-in's queues are for the CPU's memory")
    cuda, copy = FakeCuda(seed=seed, haste=haste), torch.Tensor.copy_

    def fake_copy(into: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        stream = cuda.stream_now()
        if not non_blocking or stream is cuda.compute:
            return copy(into, values)
        cuda.put(stream, "copy", lambda: copy(into, values))
        return into

    @contextmanager
    def stream(one: FakeStream) -> Iterator[None]:
        before = cuda.stream_now()
        cuda.current.stream = one
        try:
            yield
        finally:
            cuda.current.stream = before

    @contextmanager
    def device(one: torch.device) -> Iterator[None]:
        before = getattr(cuda.current, "device", None)
        cuda.current.device = one
        try:
            yield
        finally:
            cuda.current.device = before

    with patch.context() as inner:
        inner.setattr(torch.cuda, "Stream", lambda *_, **__: FakeStream(cuda))
        inner.setattr(torch.cuda, "Event", lambda **words: FakeEvent(cuda, **words))
        inner.setattr(torch.cuda, "current_stream", lambda *_: cuda.stream_now())
        inner.setattr(torch.cuda, "stream", stream)
        inner.setattr(torch.cuda, "device", device)
        inner.setattr(torch.cuda, "set_device", lambda one: setattr(cuda.current, "device", one))
        inner.setattr(torch.Tensor, "copy_", fake_copy)
        inner.setattr(torch.Tensor, "record_stream", lambda tensor, _: cuda.recorded.add(tensor.data_ptr()))
        inner.setattr(host_memory, "pin", lambda _: None)
        yield cuda
