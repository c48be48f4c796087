"""Compute the sizes of the block inputs that activation checkpointing keeps, and their placement in RAM or on drives.

The engine (`offloading/activations/offload.py`) allocates with these numbers, and the planner counts with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_trainer.plan.memory.common import Item
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiered.layout import aligned
from offload_trainer.plan.workload import Workload

INPUT_BUFFERS = 4  # host buffers that inputs pass through on their way to drives and back
INPUTS_UNDER_WAY = 2  # inputs on the device that are being copied out or back


@dataclass(frozen=True)
class BlockInputs:
    """The inputs of `count` blocks, `size` bytes each; `size` is a multiple of 4096."""

    count: int
    size: int

    @property
    def buffers(self) -> int:
        """Return the number of host buffers in front of the drives."""
        return min(INPUT_BUFFERS, self.count)

    def homes(self, drives: int) -> list[int]:
        """Return the drive index of each input; empty without drives."""
        return [number % drives for number in range(self.count)] if drives else []

    @property
    def read_back(self) -> range:
        """Return the inputs that the backward reads from a drive. The last ones are still in host buffers."""
        return range(self.count - self.buffers)


def kept_inputs(shape: ModelShape, *, rows: int, seq_len: int, item_bytes: int) -> BlockInputs:
    """Return the inputs of a micro-batch of `rows` x `seq_len` tokens, with `item_bytes` per element."""
    return BlockInputs(shape.layers, aligned(item_bytes * rows * seq_len * shape.hidden))


def inputs_of(work: Workload) -> BlockInputs:
    return kept_inputs(work.shape, rows=work.micro_batch, seq_len=work.length, item_bytes=work.item_bytes)


def input_items(work: Workload, *, device: str, drives: Sequence[str]) -> list[Item]:
    """Return plan items for the block inputs that `model.offload_activations` moves; empty if it moves none."""
    home = work.inputs_away
    if not home:
        return []
    inputs = inputs_of(work)
    name, count = "block inputs", inputs.count
    items = [Item(device, name, INPUTS_UNDER_WAY * inputs.size, f"{INPUTS_UNDER_WAY} in transfer")]
    if home == "cpu":
        return [*items, Item("ram", name, count * inputs.size, "saved by gradient checkpointing")]
    items.append(Item("ram", name, inputs.buffers * inputs.size, f"{inputs.buffers} in transfer to or from drives"))
    homes = inputs.homes(len(drives))
    for number, drive in enumerate(drives):
        items.append(Item(drive, name, homes.count(number) * inputs.size, "saved by gradient checkpointing"))
    return items
