"""One optimizer step as the planner sees it, without configuration classes: model, batch sizes, dtypes and ranks."""

from dataclasses import dataclass

from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiered.state_formats import StateFormat


@dataclass(frozen=True)
class Workload:
    """Everything that bytes and seconds depend on, except placement and the machine's rates."""

    shape: ModelShape
    dtype: str  # dtype of weights, activations and gradients: "bf16", "fp16" or "fp32"
    micro_batch: int  # rows in one forward and backward on each rank
    accumulate: int  # micro-batches per step on each rank
    seq_len: int  # tokens in a row
    world: int  # ranks of all nodes
    checkpointed: int  # the first blocks, which keep only their inputs until their backward; the others keep everything
    offload_activations: bool  # checkpointed block inputs are kept in RAM
    loss_chunk: int  # tokens whose logits are in memory at a time
    state: StateFormat  # optimizer rule, and the formats of its state
    kernel: str  # CPU update kernel: "auto" or a name
    checkpoints: int | None  # number kept on the output's drive; 0: the last weights alone; None: nothing is saved
    nodes: int = 1  # each with the same number of ranks
    tensor: int = 1  # tensor-parallel ranks, which compute the same rows
    pipeline: int = 1  # ranks that compute the same rows, each its units of the model (`owners`)
    breadth_first: bool = False  # all micro-batches pass through a block before any enters the next block
    keeps_heap: bool = False  # malloc keeps freed host memory for reuse, up to what the plan counts

    @property
    def item_bytes(self) -> int:
        """Return the bytes of one weight element."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of one element of the step's gradient sums."""
        return 4 if self.added > 1 else self.item_bytes

    @property
    def side_by_side(self) -> int:
        """Return the number of micro-batches that are between their forward and their backward at a time."""
        return self.accumulate if self.breadth_first else 1

    @property
    def passes(self) -> int:
        """Return the number of forwards through the model's weights in a step on each rank."""
        return self.accumulate // self.side_by_side

    @property
    def here(self) -> int:
        """Return the number of ranks on one node, which share its RAM and drives."""
        return self.world // self.nodes

    @property
    def data(self) -> int:
        """Return the number of data-parallel groups, each with different rows."""
        return self.world // (self.tensor * self.pipeline)

    @property
    def owners(self) -> tuple[int, ...]:
        """Return the rank of a pipeline that computes each block, and last that of the head (a tied one: the first)."""
        tied = any(weight.trainable and weight.uses > 1 for weight in self.shape.weights)
        ranks = [number % self.pipeline for number in range(len(self.shape.blocks) + 1)]
        return (*ranks[:-1], 0 if tied else ranks[-1])

    @property
    def added(self) -> int:
        """Return how many gradients of each weight a step sums, over micro-batches and data-parallel ranks."""
        return self.accumulate * self.data

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of a block's input, which are those of its output, for a micro-batch on one rank."""
        return self.item_bytes * self.micro_batch * self.seq_len * self.shape.hidden

    @property
    def tokens(self) -> int:
        """Return the tokens of a step on all ranks."""
        return self.micro_batch * self.accumulate * self.data * self.seq_len

    @property
    def inputs_away(self) -> bool:
        """Return whether inputs of checkpointed blocks leave the device; False if there are none."""
        return self.offload_activations and self.checkpointed > 0
