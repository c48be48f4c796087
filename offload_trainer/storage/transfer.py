"""Asynchronous transfers between host memory and drive files, many at a time, with every error reported.

`Transfers.read` and `write` return a `Future` immediately. They use preadv and pwritev with O_DIRECT on threads;
offsets and sizes are multiples of 4096 bytes.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from offload_trainer.common.errors import RERUN_HINT, TrainerError
from offload_trainer.common.units import format_bytes

SECTOR = 4096  # bytes
_THREADS, _BLOCK = 4, 8 << 20  # threads that read a drive, with as many that write; bytes of one call


class DriveFile:
    """A file of fixed size whose blocks are allocated on creation, so that no later write can find the disk full.

    Raises TrainerError with the numbers if the disk has too little room. `direct` is whether the filesystem supports
    O_DIRECT; otherwise the page cache's copies are dropped after use.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, -(-size // SECTOR) * SECTOR
        self.descriptor = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            try:
                self.descriptor, self.direct = os.open(path, flags | os.O_DIRECT, 0o666), True
            except OSError:
                self.descriptor, self.direct = os.open(path, flags, 0o666), False
            if self.size:
                os.posix_fallocate(self.descriptor, 0, self.size)
        except OSError as error:
            self.close()
            raise TrainerError(
                f"{path}: {format_bytes(self.size)} cannot be set aside there: {error.strerror}; free space on that "
                "drive, name another with --nvme, or keep more in memory (--ram-fraction)"
            ) from error

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the bytes at `offset`. Raises TrainerError on an error or if the file is too short."""
        self._transfer(os.preadv, "read", view, offset)

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view` at `offset`. Raises TrainerError if not every byte is written."""
        self._transfer(os.pwritev, "written", view, offset)

    def _transfer(self, call: Callable[..., int], verb: str, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                size = os.fstat(self.descriptor).st_size
                # a write to a truncated file would extend it again, with zeros in place of the lost state
                moved = call(self.descriptor, [view[done:]], offset + done) if size >= self.size else 0
            except OSError as error:
                raise TrainerError(
                    f"{self.path}: {len(view)} bytes at {offset} could not be {verb}: {error.strerror}. dmesg says "
                    f"more of the drive; {RERUN_HINT}, there or with another --nvme"
                ) from error
            if moved == 0:
                raise TrainerError(
                    f"{self.path}: cut short: {len(view)} bytes at {offset} wanted, the file has {size} of "
                    f"{self.size}; something else changed it; {RERUN_HINT}"
                )
            done += moved
        if not self.direct:
            os.posix_fadvise(self.descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Sync written data to the drive, so that it survives a power cut. Raises TrainerError if the drive refuses."""
        try:
            os.fdatasync(self.descriptor)
        except OSError as error:
            raise TrainerError(
                f"{self.path} could not be written to the end: {error.strerror}. dmesg says more of the drive; "
                f"{RERUN_HINT}, there or with another --nvme"
            ) from error

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Future:
    """A transfer in progress. `wait` blocks until all its parts, if any, have ended and raises the first error."""

    def __init__(self, parts: int = 1) -> None:
        self._left = parts
        self._error: BaseException | None = None
        self._lock, self._running = threading.Lock(), threading.Lock()  # an Event takes ten times as long to create
        self._after: list[Callable[[BaseException | None], None]] = []
        if parts:
            self._running.acquire()  # released when the last part has ended

    @property
    def done(self) -> bool:
        return self._left <= 0

    def wait(self) -> None:
        if not self.done:
            with self._running:
                pass
        if self._error is not None:
            raise self._error

    def then(self, action: Callable[[BaseException | None], None]) -> None:
        """Call `action(error)` when the transfer has ended: now if it has, otherwise later on a transfer thread."""
        with self._lock:
            if not self.done:
                self._after.append(action)
                return
        action(self._error)

    def finish_part(self, error: BaseException | None = None) -> None:
        """Report that one part has ended; the last part completes the future. Called by transfer implementations."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
            self._running.release()
            after, self._after = self._after, []
        for action in after:
            action(self._error)


def together(futures: Sequence[Future]) -> Future:
    """Return a future that completes when all `futures` have."""
    future = Future(parts=len(futures))
    for one in futures:
        one.then(future.finish_part)
    return future


def followed(future: Future, work: Callable[[], object]) -> Future:
    """Return a future that completes once `future` has succeeded and `work` has run.

    `work` runs on the thread that completes `future`, or on the calling thread if that has happened already. An error
    of either becomes the error of the returned future, which waits for a future that `work` returns.
    """
    both = Future()
    future.then(lambda error: both.finish_part(error) if error else ending(both, work)())
    return both


def done() -> Future:
    """Return a completed future."""
    return Future(parts=0)


def ending(future: Future, work: Callable[[], object]) -> Callable[[], None]:
    """Wrap `work` as a job that ends one part of `future`, with its error, or with the future that it returns."""

    def carry_out() -> None:
        try:
            result = work()
        except BaseException as error:
            future.finish_part(error)
        else:
            result.then(future.finish_part) if isinstance(result, Future) else future.finish_part()

    return carry_out


class Workers:
    """Daemon threads that take jobs from one queue in order."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # release the job's references, such as its buffers, before waiting for the next one

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def submit(self, work: Callable[[], object]) -> Future:
        """Queue `work`; return a future that ends with it, or with the exception that it raises."""
        future = Future()
        self.put(ending(future, work))
        return future

    def close(self, *, patience: float | None = None) -> None:
        """Finish the queued jobs and end the threads. Waits at most `patience` seconds for each thread if set."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(patience)


class Transfers:
    """Transfers with preadv and pwritev, on four reader and four writer threads times the drives, which share them.

    A buffer is a contiguous CPU tensor that no other code touches until the future completes. Reads and writes never
    wait for each other. Each call moves at most `_BLOCK` bytes. With two or eight threads, or with calls of 1 MiB, a
    drive of 1 GB/s each way was at most 3 % faster.
    """

    def __init__(self, *, drives: int = 1) -> None:
        threads = _THREADS * max(1, drives)
        self._readers = Workers(threads, "read")
        self._writers = Workers(threads, "write")

    def read(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        return self._start(self._readers, file.read, offset, buffer)

    def write(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        return self._start(self._writers, file.write, offset, buffer)

    def _start(
        self, workers: Workers, move: Callable[[memoryview, int], None], offset: int, buffer: torch.Tensor
    ) -> Future:
        assert buffer.is_contiguous()
        data = buffer.view(-1).view(torch.uint8).numpy().data
        assert offset % SECTOR == 0, offset
        assert len(data) % SECTOR == 0, len(data)
        starts = range(0, len(data), _BLOCK)
        future = Future(parts=len(starts))
        for start in starts:
            workers.put(ending(future, partial(move, data[start : start + _BLOCK], offset + start)))
        return future

    def close(self) -> None:
        self._readers.close()
        self._writers.close()
