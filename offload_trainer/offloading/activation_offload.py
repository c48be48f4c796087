"""Offload the inputs of checkpointed blocks to host memory or drives in the forward; prefetch them in the backward.

    forward   input ──side stream──> host buffer (──> drive)      its device memory is free once it is copied
    backward  (drive ──>) host buffer ──side stream──> device     one block ahead of its recomputation

In host memory each input has its own buffer. For drives a few buffers form a ring: input n passes through buffer
n % count. In the forward a buffer is reused once its bytes are on the drive, in the backward once its input has been
copied to the device. The computation never waits for copies to the host, but the host waits if more than a few are in
flight. Inputs are expected back from the last block to the first; any other order is correct, but slower.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from offload_trainer.errors import UserError
from offload_trainer.offloading.device import Device, DeviceCopy
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher
from offload_trainer.plan.memory import INPUTS_UNDER_WAY, BlockInputs
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import SECTOR, DriveFile, Future, Transfers, done, followed, together


@dataclass
class _Buffer:
    """A host buffer, and the input that it holds or is receiving."""

    memory: torch.Tensor  # uint8
    holds: "_SavedInput | None" = None
    filled: Future = field(default_factory=done)
    readers: list[Future] = field(default_factory=list)  # transfers that still read from it

    @property
    def free(self) -> Future:
        """Return a future that completes when all transfers with this buffer have ended."""
        return together([self.filled, *self.readers])


@dataclass
class _SavedInput:
    """An offloaded input: its number in a forward, the buffer that it passes through, and its place on a drive."""

    forward: int
    number: int
    shape: torch.Size
    buffer: _Buffer
    values: torch.Tensor  # its part of the buffer (1-D)
    place: tuple[DriveFile, int, torch.Tensor] | None  # file, offset, and its part of the buffer in whole sectors
    written: Future = field(default_factory=done)  # to that place


class Activations:
    """A store that keeps the block inputs of one forward in host memory or on drives until its backward uses them."""

    def __init__(
        self,
        inputs: BlockInputs,
        *,
        device: Device,
        files: Sequence[DriveFile],
        transfers: Transfers,
        references: WeightPrefetcher,
    ) -> None:
        """Allocate buffers for the expected `inputs`; additional and larger ones are kept in host memory.

        Without `files` all inputs are kept in host memory; otherwise the files store `inputs.homes(len(files))`.
        `references` are those of offloaded weights, which autograd may save with the inputs.
        """
        self._device, self._transfers, self._references = device, transfers, references
        self._inputs, self._files = inputs, tuple(files)
        count = inputs.buffers if files else inputs.count
        memory = host_buffer(count * inputs.size, pinned=device.is_cuda)
        self._ring = [_Buffer(memory[n * inputs.size :][: inputs.size]) for n in range(count)]
        self._unplanned: dict[int, _Buffer] = {}  # of additional and larger inputs, by number
        self._forward, self._in_forward = 0, False  # number of the current forward, and whether it is running
        self._kept: list[_SavedInput] = []  # inputs of this forward, by number
        self._downloads: deque[Future] = deque()  # copies from the device, the oldest first
        self._prefetched: dict[int, tuple[torch.Tensor, DeviceCopy]] = {}

    def attach(self, model: nn.Module) -> None:
        """Make the checkpointed blocks of `model` store inputs here; call it after each change of checkpointing."""
        for module in model.modules():
            checkpoint = getattr(module, "_gradient_checkpointing_func", None)
            if checkpoint is not None and getattr(checkpoint, "func", None) != self._checkpoint:
                setattr(module, "_gradient_checkpointing_func", partial(self._checkpoint, checkpoint))  # noqa: B010

    def _checkpoint(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **words: Any
    ) -> Any:
        """Call torch's `checkpoint` function, and store the block inputs that it saves here."""
        if not torch.is_grad_enabled():
            return checkpoint(function, *args, **words)
        # Masks and positions need no gradient; all blocks share them, so they stay on the device.
        wanted = {_identity(one) for one in args if isinstance(one, torch.Tensor) and one.requires_grad}

        def pack(tensor: torch.Tensor) -> Any:
            if _identity(tensor) in wanted and tensor.is_contiguous() and tensor.numel():
                return self.pack_input(tensor)
            return self._references.pack(tensor)

        if not self._in_forward:
            raise UserError(
                "a part of the model, or its forward(), was called by itself, and offload_activations keeps what "
                "whole forwards keep: call the model"
            )
        with torch.autograd.graph.saved_tensors_hooks(pack, self.unpack):
            return checkpoint(function, *args, **words)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap each forward that a backward follows; its inputs replace those of the previous forward."""
        self._kept.clear()
        self._prefetched.clear()
        self._forward += 1
        with patch.object(self, "_in_forward", True):
            yield
        self._look_ahead(len(self._kept) - 1)

    # -- forward ------------------------------------------------------------------------------------------------------

    def pack_input(self, tensor: torch.Tensor) -> _SavedInput:
        """Start copying a block input to its host buffer, and from there to its drive; return its handle."""
        number, size, place = len(self._kept), tensor.nbytes, None
        if number < self._inputs.count and size <= self._inputs.size:
            buffer = self._ring[number % len(self._ring)]
            if self._files:
                row, home = divmod(number, len(self._files))  # as `BlockInputs.homes` places them
                place = self._files[home], row * self._inputs.size, buffer.memory[: -(-size // SECTOR) * SECTOR]
        else:
            buffer = self._unplanned.setdefault(number, _Buffer(torch.empty(0, dtype=torch.uint8)))
        buffer.free.wait()
        if buffer.memory.numel() < size:
            buffer.memory = host_buffer(size, pinned=self._device.is_cuda)
        values = buffer.memory[:size].view(tensor.dtype)
        kept = _SavedInput(self._forward, number, tensor.shape, buffer, values, place)
        self._kept.append(kept)
        buffer.holds, buffer.readers = kept, []
        buffer.filled = self._device.keep(tensor.detach().view(-1), values)
        if place:
            kept.written = followed(buffer.filled, partial(self._transfers.write, *place))
            buffer.readers.append(kept.written)
        self._downloads.append(buffer.filled)
        if len(self._downloads) > INPUTS_UNDER_WAY:
            self._downloads.popleft().wait()  # otherwise inputs in flight would fill the device's memory
        return kept

    # -- backward -----------------------------------------------------------------------------------------------------

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return a saved tensor on the device, and prefetch the one before. Raises UserError if it is gone."""
        if not isinstance(kept, _SavedInput):
            return self._references.unpack(kept)
        if kept.forward != self._forward:
            raise UserError(
                "another forward came between a forward and its backward, and what the first one kept is gone: with "
                "offload_activations each backward follows its forward"
            )
        known = kept.number in self._prefetched
        values, arrival = self._prefetched.pop(kept.number) if known else self._fetch(kept)
        arrival.wait()
        self._look_ahead(kept.number - 1)
        return values.view(kept.shape)

    def _look_ahead(self, number: int) -> None:
        if number >= 0 and not self._prefetched:
            self._prefetched[number] = self._fetch(self._kept[number])

    def _fetch(self, kept: _SavedInput) -> tuple[torch.Tensor, DeviceCopy]:
        """Start copying an input to the device, and then reading the next input into the same buffer."""
        buffer = kept.buffer
        if buffer.holds is not kept:
            self._read(kept)
        values, after = torch.empty_like(kept.values, device=self._device.place), self._device.mark()
        arrival, read = self._device.copy_back(kept.values, values, after=after, ready=buffer.filled)
        buffer.readers.append(read)
        ahead = kept.number - len(self._ring)
        if kept.place and ahead >= 0 and self._kept[ahead].buffer is buffer:
            self._read(self._kept[ahead])
        return values, arrival

    def _read(self, kept: _SavedInput) -> None:
        assert kept.place is not None
        buffer, before = kept.buffer, together([kept.buffer.free, kept.written])
        buffer.holds, buffer.readers = kept, []
        buffer.filled = followed(before, partial(self._transfers.read, *kept.place))

    def close(self) -> None:
        """Wait for all transfers, successful or not."""
        for buffer in (*self._ring, *self._unplanned.values()):
            with suppress(Exception):
                buffer.free.wait()
            buffer.holds = None  # the two would keep each other, and the memory


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key for a tensor's memory, shape and dtype, because autograd saves an alias, not the same object."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype
