"""Define the interface of the computing device and its asynchronous copies; implement it for the CPU.

    fetch     host memory or a drive -> a ring buffer on the device     (prefetched weights)
    upload    host memory -> the device                                 (new weights from the update)
    download  the device -> host memory                                 (gradients)
    keep, copy_back   the device -> host memory -> the device           (inputs of checkpointed blocks)
    side_stream   computation during forward and backward               (the update of state on the device)

Copies are ordered by events, and the host waits for none of them while a model runs. The CPU's copies run on a thread,
so that the CPU follows the same protocol. Tests delay and reorder them, so that each missing wait shows as a wrong
number. `cuda_device.py` implements the interface for a GPU.

Also here: the cores that work on the host may use meanwhile, and the return of freed memory between blocks on a CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload_trainer.storage.host_memory import Heap, host_buffer
from offload_trainer.storage.transfer import Future, Workers, done, ending

Read = Callable[[torch.Tensor], Future]  # fills a host tensor from a drive
_BLOCKS_PER_TRIM = 8  # a trim takes 10 ms, and a block of 1024 x 1024 elements leaves 20 MB


@runtime_checkable
class QueuedFill(Protocol):
    """A `Read` that a GPU may also queue on a separate stream: an all-gather between the devices of several ranks."""

    def when(self, then: Callable[[BaseException | None], None]) -> None:
        """Call `then` once, on a thread, when it is this rank's turn to `fill`, or with an error."""

    def fill(self, into: torch.Tensor, copy: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        """Queue filling `into` (on the device); `copy` queues a copy from host memory to the device."""


class DeviceCopy(Protocol):
    """A copy to the device. Computations that are queued after `wait` see the copied data."""

    def wait(self) -> None: ...


@dataclass(frozen=True)
class ReturnCopy:
    """A copy back to the device."""

    arrival: DeviceCopy
    left: Future  # the source may be overwritten


class Device(Protocol):
    """The device that computes forward and backward, with asynchronous copies to and from host memory."""

    place: torch.device
    is_cuda: bool
    in_host_memory: bool  # the host may use the device's tensors without a copy

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory on the device."""
        ...

    def mark(self) -> Any:
        """Return an event after everything that is queued on the device so far."""
        ...

    def fetch(self, source: torch.Tensor | Read, into: torch.Tensor, *, after: Any) -> DeviceCopy:
        """Fill `into` (on the device) from host memory or by a read, after the event `after`."""
        ...

    def upload(self, values: torch.Tensor, into: torch.Tensor, *, after: Any) -> Future:
        """Copy host memory to `into` on the device, which may still use its old contents until the event `after`."""
        ...

    def download(self, values: torch.Tensor, into: torch.Tensor, *, after: Any = None) -> Future:
        """Copy `values` (on the device) to host memory after the event `after`, or after everything queued so far."""
        ...

    def keep(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        """Copy `values` (on the device) to host memory concurrently, and keep them alive until it is done."""
        ...

    def copy_back(self, source: torch.Tensor, into: torch.Tensor, *, after: Any, ready: Future) -> ReturnCopy:
        """Fill `into` (on the device) from host memory, after the event `after` and when the source is `ready`."""
        ...

    def side_stream(self, *, after: Any) -> AbstractContextManager[None]:
        """Queue the work inside the context on a side stream, after the event `after`, in order, from any thread."""
        ...

    def reached(self) -> Future:
        """Return a future that completes after everything queued so far, on the main or the current side stream."""
        ...

    def close(self) -> None: ...


class CpuDevice:
    """The CPU as a device, whose memory is host memory."""

    place, is_cuda, in_host_memory = torch.device("cpu"), False, True

    def __init__(self) -> None:
        self._copies = Workers(1, "copy")

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return host_buffer(elements * dtype.itemsize).view(dtype)

    def mark(self) -> None:
        return None  # the CPU computes synchronously

    def fetch(self, source: torch.Tensor | Read, into: torch.Tensor, *, after: Any) -> DeviceCopy:
        if not isinstance(source, torch.Tensor):
            return source(into)
        return self.upload(source, into, after=after)

    def upload(self, values: torch.Tensor, into: torch.Tensor, *, after: Any) -> Future:
        future = Future()
        self._copies.put(ending(future, lambda: copy_alone(values, into)))
        return future

    def keep(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        held, future = [values], Future()
        self._copies.put(ending(future, lambda: copy_alone(held.pop(), into)))  # freed before the future completes
        return future

    def copy_back(self, source: torch.Tensor, into: torch.Tensor, *, after: Any, ready: Future) -> ReturnCopy:
        future, copy = Future(), lambda: copy_alone(source, into)
        ready.then(lambda error: future.finish_part(error) if error else self._copies.put(ending(future, copy)))
        return ReturnCopy(future, future)

    def download(self, values: torch.Tensor, into: torch.Tensor, *, after: Any = None) -> Future:
        into.copy_(values)
        return done()

    def side_stream(self, *, after: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def reached(self) -> Future:
        return done()

    def close(self) -> None:
        self._copies.close()


def copy_alone(values: torch.Tensor, into: torch.Tensor) -> None:
    """Copy with one thread. torch's copy would start a second thread team that competes with the computation."""
    assert values.dtype is into.dtype
    assert values.numel() == into.numel()
    assert values.is_contiguous()
    assert into.is_contiguous()
    ctypes.memmove(into.data_ptr(), values.data_ptr(), values.nbytes)


def cores_beside(device: Device) -> int:
    """Return the number of cores for host work that runs while the device computes the model.

    On a CPU the model has the other cores. With a GPU the training thread and autograd's thread launch kernels; without
    a core of their own each launch would wait for one.
    """
    return max(1, torch.get_num_threads() - 2) if device.is_cuda else 1


def limit_cores(thread: Workers, cores: int) -> None:
    """Let torch and the compiled kernels use `cores` cores on this thread, and leave all other threads as they are."""
    threads, taken = torch.get_num_threads(), Future()

    def take() -> None:
        torch.get_num_threads()  # makes torch initialise this thread first; otherwise it would overwrite the next line
        torch.set_num_threads(cores)

    thread.put(ending(taken, take))
    taken.wait()
    torch.set_num_threads(threads)  # also sets the default for new threads


def trim_heap_between(blocks: Sequence[tuple[nn.Module, nn.Parameter | None]], *, heap: Heap) -> list[RemovableHandle]:
    """Register hooks that trim `heap` after every 8th block, in forward and backward.

    Each block comes with the parameter whose gradient is its last, or None if the block is frozen. glibc up to 2.37
    cuts each aligned allocation out of a larger one and does not reuse the holes. With allocations of up to 10 MiB, a
    forward through 24 blocks of GPT-2 on a CPU leaves 570 MB of holes, in addition to the largest tensors: the loss and
    the embeddings' gradients.
    """

    def trim(*_: object) -> None:
        heap.trim()

    hooks = []
    for number, (module, parameter) in enumerate(blocks):
        if (number + 1) % _BLOCKS_PER_TRIM == 0 or module is blocks[-1][0]:
            hooks.append(module.register_forward_hook(trim))
        if number % _BLOCKS_PER_TRIM == 0 and parameter is not None:
            hooks.append(parameter.register_post_accumulate_grad_hook(trim))
    return hooks
