"""Offload the inputs of checkpointed blocks to host memory in the forward; prefetch them in the backward.

The computation never waits for copies to the host, but the host waits if more than a few are in flight. In the backward
each input is copied back one block ahead of its recomputation. Inputs are expected back from the last block to
the first; any other order is correct, but slower.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from offload_trainer.storage.transfer import Future, done, together


@dataclass(frozen=True)
class _SavedInput:
    """An offloaded input: its number in a forward, and its part of a host buffer (1-D)."""

    forward: int
    number: int
    shape: torch.Size
    values: torch.Tensor
    filled: Future


class Activations:
    """A store that keeps the block inputs of one forward in host memory until its backward uses them."""

    def __init__(self, inputs: BlockInputs, *, device: Device, references: WeightPrefetcher) -> None:
        """Allocate a buffer for each of the expected `inputs`; additional and larger ones get theirs when they come.

        `references` are those of offloaded weights, which autograd may save with the inputs.
        """
        self._device, self._references = device, references
        memory = host_buffer(inputs.count * inputs.size, pinned=device.is_cuda)
        self._buffers = [*memory.split(inputs.size)]  # of each input of a forward, uint8
        self._free = [done() for _ in self._buffers]  # each completes when no copy uses the buffer any more
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

    def pack_input(self, tensor: torch.Tensor) -> _SavedInput:
        """Start copying a block input to its host buffer; return its handle."""
        number, size = len(self._kept), tensor.nbytes
        if number == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
            self._free.append(done())
        self._free[number].wait()
        if self._buffers[number].numel() < size:
            self._buffers[number] = host_buffer(size, pinned=self._device.is_cuda)
        values = self._buffers[number][:size].view(tensor.dtype)
        filled = self._free[number] = self._device.keep(tensor.detach().view(-1), values)
        kept = _SavedInput(self._forward, number, tensor.shape, values, filled)
        self._kept.append(kept)
        self._downloads.append(filled)
        if len(self._downloads) > INPUTS_UNDER_WAY:
            self._downloads.popleft().wait()  # otherwise inputs in flight would fill the device's memory
        return kept

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
        """Start copying an input to the device."""
        values, after = torch.empty_like(kept.values, device=self._device.place), self._device.mark()
        arrival, read = self._device.copy_back(kept.values, values, after=after, ready=kept.filled)
        self._free[kept.number] = together([self._free[kept.number], read])
        return values, arrival

    def close(self) -> None:
        """Wait for all copies, successful or not."""
        for free in self._free:
            with suppress(Exception):
                free.wait()


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key for a tensor's memory, shape and dtype, because autograd saves an alias, not the same object."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype
