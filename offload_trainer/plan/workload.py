"""One optimizer step as the plan's arithmetic sees it: what the model counts, and how much goes through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offload_trainer.plan.formats import StateFormat
from offload_trainer.plan.shape import ModelShape


@dataclass(frozen=True)
class Workload:
    """Everything that bytes and seconds depend on beside where things live, and how fast that is."""

    shape: ModelShape
    dtype: str  # of weights, activations and gradients: "bf16", "fp16" or "fp32"
    micro_batch: int  # rows in one forward and backward, on each rank
    accumulate: int  # micro-batches, on each rank
    seq_len: int  # tokens of a row
    world: int  # ranks, on all nodes
    checkpointing: bool
    offload_activations: bool | Literal["cpu", "nvme"]  # where what checkpointing keeps goes; False: it stays
    loss_chunk: int  # tokens whose logits exist at a time
    sums: Literal["fp32", "model"]  # dtype that gradients of several micro-batches are added in
    state: StateFormat  # what the rule of the update keeps, and its moments' format
    kernel: str  # of the update on the CPU: "auto" or its name
    checkpoints: int | None  # kept on the output's drive; 0: the weights are exported there instead; None: nothing is
    nodes: int = 1  # with as many ranks each
    tensor: int = 1  # ranks that share each product, and so rows
    sequence: int = 1  # ranks that share rows, and have a piece of each
    mlp_chunk: int = 0  # tokens that go through an MLP at a time; 0: all of a micro-batch
    partition: bool = False  # of what checkpointing keeps each tensor rank keeps a part

    @property
    def item_bytes(self) -> int:
        """Of a weight."""
        return item_bytes(self.dtype)

    @property
    def gradient_bytes(self) -> int:
        """Of an element of the step's sums: a weight's where there is one micro-batch."""
        return 4 if self.added > 1 and self.sums == "fp32" else self.item_bytes

    @property
    def here(self) -> int:
        """Ranks of one node, which share its RAM and drives."""
        return self.world // self.nodes

    @property
    def data(self) -> int:
        """Ranks with rows of their own."""
        return self.world // (self.tensor * self.sequence)

    @property
    def length(self) -> int:
        """Tokens of a row that a rank has."""
        return self.seq_len // self.sequence

    @property
    def added(self) -> int:
        """Micro-batches, or pieces of such, whose gradients a step adds up, on all ranks."""
        return self.accumulate * self.data * self.sequence

    @property
    def tokens(self) -> int:
        """Of a step, on all ranks."""
        return self.micro_batch * self.accumulate * self.data * self.seq_len

    @property
    def inputs_away(self) -> bool | Literal["cpu", "nvme"]:
        """Where the inputs of checkpointed blocks go; False where they stay, or there are none."""
        return self.checkpointing and self.offload_activations

    @property
    def keepers(self) -> int:
        """Ranks that each input of a checkpointed block is divided over."""
        return self.tensor if self.checkpointing and self.partition else 1


_CHUNKS = (8192, 4096, 2048, 1024, 512, 256)  # tokens; smaller ones cost products' speed and save little


def chunks_of(work: Workload) -> tuple[int, ...]:
    """Pieces of a micro-batch that MLPs may run on, the largest first; none where they are not known to run on them."""
    known = work.shape.tiled_on_gpu is not None
    return tuple(chunk for chunk in _CHUNKS if known and chunk < work.micro_batch * work.length)


def item_bytes(dtype: str) -> int:
    return 4 if dtype == "fp32" else 2
