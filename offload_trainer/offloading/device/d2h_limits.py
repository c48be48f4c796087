"""Limit the bytes of device-to-host copies in flight, on the device and in the host ring buffer that they pass through.

Copies are asynchronous. Only a copy that would exceed a limit waits, for the oldest one.
"""

from __future__ import annotations

from collections import deque

import torch

from offload_trainer.storage.transfer import Future

_ALIGN = 64  # bytes


class InFlight:
    """Device tensors that are kept until their copies have completed.

    The limit of `bound` bytes does not count the largest tensor. Otherwise a head's gradient, larger than everything
    else, would block the following copies until it has left.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._out: deque[tuple[int, Future]] = deque()

    def add(self, size: int, gone: Future) -> None:
        """Count `size` bytes until `gone` completes, after waiting for room; raise errors of copies waited for."""
        self._out.append((size, gone))
        while self._out and (self._out[0][1].done or self._beside_the_largest() > self._bound):
            self._out.popleft()[1].wait()

    def _beside_the_largest(self) -> int:
        sizes = [size for size, _ in self._out]
        return sum(sizes) - max(sizes)

    def synchronize(self) -> None:
        """Wait until all copies have completed."""
        while self._out:
            self._out.popleft()[1].wait()


class Ring:
    """A ring buffer in host memory, whose pieces are reused after they have been read."""

    def __init__(self, memory: torch.Tensor) -> None:
        """Use `memory`, a uint8 tensor."""
        self._memory, self._next = memory, 0
        self._out: deque[tuple[int, int, Future]] = deque()  # start, end, future that frees the piece

    @property
    def largest_piece(self) -> int:
        """Return the largest piece in bytes: a quarter, so that a large tensor is read while more of it arrives."""
        return len(self._memory) // 4 // _ALIGN * _ALIGN

    def take(self, size: int) -> tuple[torch.Tensor, Future]:
        """Return the next `size` bytes, and the future to complete when they have been read.

        Errors of earlier pieces in that place are raised.
        """
        assert size <= self.largest_piece
        start = self._next if self._next + size <= len(self._memory) else 0
        end = start + size
        while any(first < end and start < last for first, last, _ in self._out):
            self._out.popleft()[2].wait()
        future = Future()
        self._out.append((start, end, future))
        self._next = -(-end // _ALIGN) * _ALIGN
        return self._memory[start:end], future
