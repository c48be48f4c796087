"""What bounds the bytes on their way out of the device: there, and in the host memory that they pass through.

Nobody waits for a copy as such; whoever would exceed a bound waits for the oldest one.
"""

from __future__ import annotations

from collections import deque

import torch

from offload_trainer.storage.transfer import Future

_ALIGN = 64  # bytes


class InFlight:
    """Tensors that the device keeps until their copies have left it.

    Beside the largest of them at most `bound` bytes: a head's gradient, larger than all else, would stop the next ones
    for the whole of its way otherwise.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._out: deque[tuple[int, Future]] = deque()

    def add(self, size: int, gone: Future) -> None:
        """`size` bytes are on their way until `gone` is done. Raises what went wrong with those waited for."""
        self._out.append((size, gone))
        while self._out and (self._out[0][1].done or self._beside_the_largest() > self._bound):
            self._out.popleft()[1].wait()

    def _beside_the_largest(self) -> int:
        sizes = [size for size, _ in self._out]
        return sum(sizes) - max(sizes)

    def settle(self) -> None:
        """All have left when this returns."""
        while self._out:
            self._out.popleft()[1].wait()


class Ring:
    """Host memory given out piece after piece, and again once it has been read."""

    def __init__(self, memory: torch.Tensor) -> None:
        """`memory`: uint8."""
        self._memory, self._next = memory, 0
        self._out: deque[tuple[int, int, Future]] = deque()  # start, end, until when

    @property
    def largest_piece(self) -> int:
        """Bytes: a quarter, so that a large tensor is read while more of it arrives."""
        return len(self._memory) // 4 // _ALIGN * _ALIGN

    def take(self, size: int) -> tuple[torch.Tensor, Future]:
        """The next `size` bytes, and the future to end when they have been read.

        Raises what went wrong with the ones that were there.
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
