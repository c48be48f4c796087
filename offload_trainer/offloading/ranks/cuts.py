"""Pass the outputs of blocks, and their gradients, between the ranks of a pipeline through host memory that they share.

A micro-batch is at one block at a time, and the rank that writes its slot has computed from what it read there, so one
slot for each micro-batch is enough. A message says that the slot is filled.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from offload_trainer import ranks
from offload_trainer.common.errors import RERUN_HINT, PeerFailed, TrainerError
from offload_trainer.offloading.allocation import EngineParts
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher
from offload_trainer.plan.memory import BlockInputs
from offload_trainer.storage.host_memory import pin
from offload_trainer.storage.transfer import Future, done, followed


@dataclass(frozen=True)
class Like:
    """The shape and dtype of a block's output and of its gradient."""

    shape: torch.Size
    dtype: torch.dtype

    def absent(self, device: torch.device) -> torch.Tensor:
        """Return NaN in this shape, without its memory."""
        return torch.full((), torch.nan, dtype=self.dtype, device=device).expand(self.shape)


class Cuts:
    """The slots between the blocks of a model, whose block b the rank `owners[b]` computes, the last what follows."""

    def __init__(
        self, parts: EngineParts, owners: Sequence[int], slots: BlockInputs, *, stream: WeightPrefetcher
    ) -> None:
        """Allocate `slots`, one for each micro-batch of a pipeline. All ranks call it."""
        self.blocks = len(owners) - 1
        node, device = parts.node, parts.device
        self._owners, self._node, self._device, self._stream = tuple(owners), node, device, stream
        memory = node.memory_of_each(slots.count * slots.size)[owners[0]]  # only that of each pipeline's first is used
        if device.is_cuda:
            pin(memory)
        self._slots = memory.split(slots.size)
        self._messages = ranks.group_of()
        self._sent: list[Future] = []
        self._waits: list[Callable[[], None]] = []

    def here(self, block: int) -> bool:
        """Return whether this rank computes the block, or with `blocks` what follows them."""
        return self._owners[block] == self._node.rank

    def before(self, block: int) -> AbstractContextManager[Any]:
        """Wrap the code that precedes a block. It computes with absent weights if another rank computes the block."""
        return patch.object(self._stream, "absent", not self.here(block))

    @contextmanager
    def evaluating(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Wrap a forward without a backward, in which this rank computes only its own of the model's `blocks`."""
        with ExitStack() as stack:
            for number, block in enumerate(blocks):
                stack.enter_context(patch.object(block, "forward", partial(self._evaluate, number, block.forward)))
            with self.before(0):
                yield
        self.finish()

    def _evaluate(
        self, block: int, forward: Callable[..., torch.Tensor], hidden: torch.Tensor, *args: Any, **words: Any
    ) -> torch.Tensor:
        """Return the block's output if this rank computes it or the next block, else NaN."""
        like, here, next_here = Like(hidden.shape, hidden.dtype), self.here(block), self.here(block + 1)
        output = forward(hidden, *args, **words) if here else like.absent(hidden.device)
        if here and not next_here:
            self.send(output, micro_batch=0, block=block, forward=True)
        elif next_here and not here:
            output = self.receive(like, micro_batch=0, block=block, forward=True)
        self._stream.absent = not next_here
        return output

    def send(self, values: torch.Tensor, *, micro_batch: int, block: int, forward: bool) -> None:
        """Send a block's output to the next block's rank, with the generators' state, or its gradient to its own."""
        flat, (room, *rest) = values.detach().contiguous().view(-1), self._parts(micro_batch)
        for state, part in zip(_generators(), rest, strict=True) if forward else ():
            part.copy_(state)
        message = torch.tensor([2 * block + forward, micro_batch])
        tell = partial(self._messages.begin, [(self._owners[block + forward], message)], [])
        into = room[: flat.nbytes].view(flat.dtype)
        self._sent.append(followed(self._device.keep(flat, into), lambda: self._waits.append(tell())))

    def receive(self, like: Like, *, micro_batch: int, block: int, forward: bool) -> torch.Tensor:
        """Return what another rank sends, once it has come; in the forward, set the generators' state too."""
        message, peer, begun = torch.empty(2, dtype=torch.int64), self._owners[block + (not forward)], time.monotonic()
        try:
            self._messages.begin([], [(peer, message)])(ranks.STALLED)
        except PeerFailed as error:
            if time.monotonic() - begun < ranks.STALLED - 1:
                raise
            who = f"after {ranks.STALLED:g} s rank {peer}, or one that it waits for,"
            missing = f"{who} has not computed block {block} or its gradient"
            raise TrainerError(f"{missing}, and the run ends; {RERUN_HINT}") from error
        assert message.tolist() == [2 * block + forward, micro_batch], "ranks go through the blocks in another order"
        values = torch.empty(like.shape, dtype=like.dtype, device=self._device.torch_device)
        room, *rest = self._parts(micro_batch)
        source, after = room[: values.nbytes].view(like.dtype), self._device.mark()
        self._device.copy_back(source, values.view(-1), after=after, ready=done())[0].wait()
        if forward:
            torch.set_rng_state(rest[0].clone())
            if len(rest) > 1:
                torch.cuda.set_rng_state(rest[1].clone())
        return values

    def _parts(self, micro_batch: int) -> Sequence[torch.Tensor]:
        """Return the parts of a slot for values and for the state of each generator."""
        slot, sizes = self._slots[micro_batch], [state.numel() for state in _generators()]
        return slot.split([len(slot) - sum(sizes), *sizes])

    def finish(self) -> None:
        """Wait until everything that was sent in this step has been received; raise errors of copies."""
        for sent in self._sent:
            sent.wait()
        for wait in self._waits:
            wait()
        self._sent, self._waits = [], []


def _generators() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
