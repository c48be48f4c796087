"""What a model is made of, counted: all that the plan needs to know of it. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from offload_trainer.plan.activations import Activations, Growth, Part

# How tensor parallel divides a weight: "column", by its products' outputs; "row", by their inputs; "summed": whole,
# while each rank has part of its gradient; "": whole, or nobody knows.
Split = Literal["", "column", "row", "summed"]


@dataclass(frozen=True)
class Weight:
    """One parameter tensor, tied ones counted once."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    unit: str = ""  # name of the block that it is in, or of its own module
    block: bool = False  # whether that is one of the repeated blocks
    part: str = ""  # of a divided block (`plan/divided.py`): what of it the weight comes with; "": all of its unit
    uses: int = 1  # modules that hold it: 2 for tied embeddings
    spared: bool = False  # a bias or part of a norm, although it is not a vector
    split: Split = ""
    products: float = (
        1.0  # a token's with it: 0 for a norm or an embedding that is only looked up, 1/4 for 2 of 8 experts
    )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices and embeddings; biases, norms and other vectors are spared."""
        return len(self.shape) > 1 and not self.spared

    @property
    def scales(self) -> bool:
        """A norm's: it stands before the matrices of its unit, wherever it is named."""
        return len(self.shape) == 1 and not self.name.endswith("bias")


@dataclass(frozen=True)
class Needs:
    """Names of a block's weights in the order in which they are needed, each time that they are; none of a tower's."""

    block: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]  # where blocks are checkpointed, with those that this one is computed again with


@dataclass(frozen=True)
class Order:
    """Names of blocks, and of modules outside them, in the order in which a pass needs their weights, each time."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]


@dataclass(frozen=True)
class ModelShape:
    """Counts of a causal language model, its parameters in the model's own order."""

    weights: tuple[Weight, ...]
    layers: int
    hidden: int
    vocabulary: int
    context: int
    attention: tuple[int, ...] = ()  # of each block: heads x (size of a key + size of a value)
    heads: int = 0  # of attention; 0: not known
    key_heads: int = 0  # of keys and values, which several of those may share
    on_gpu: Activations | None = None  # what forward and backward hold; None: it could not be counted
    on_cpu: Activations | None = None  # the same with a CPU's kernels
    tiles: tuple[str, ...] = ()  # parts of blocks that can run on pieces of a row, where that was looked at
    tiles_again: tuple[str, ...] = ()  # those of them that a checkpointed block's recomputation runs as well
    tiled_on_gpu: Activations | None = None  # what is held with those in pieces; None: it could not be counted
    tiled_on_cpu: Activations | None = None
    apart: tuple[str, ...] = ()  # blocks, and modules in them, whose parts' weights need not be there at once
    needs: tuple[Needs, ...] = ()  # of blocks, where some are among those
    order: Order | None = None  # of a pass; None: as weights are registered (`plan/order.py`), or not known
    can_checkpoint: bool = True  # whether its blocks can be checkpointed
    whole_logits: bool = False  # whether the loss needs those of all tokens of a micro-batch at once
    packed: bool = False  # whether a mask keeps documents of a row apart
    notes: tuple[str, ...] = ()  # what a plan has to say of it

    @property
    def parameters(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def trainable(self) -> int:
        return sum(weight.numel for weight in self.weights if weight.trainable)

    @property
    def largest(self) -> int:
        return max(weight.numel for weight in self.weights)

    @property
    def widths(self) -> int:
        """Elements of a token that go into the products of all blocks and come out of them.

        Where no blocks are known: of all that is not an embedding or a head.
        """
        inside = [w for w in self.weights if w.block] or [w for w in self.weights if self.vocabulary not in w.shape]
        return int(_widths(inside))

    # -- floating-point operations of one token: matrix products, of what is really multiplied. Attention is counted
    # over the whole row, also where half of it is masked (Chowdhery et al. 2022, PaLM, appendix B).

    def flops_per_token(self, *, seq_len: int) -> float:
        """Forward and backward. What is computed twice is counted once, as is the custom for FLOPs utilisation."""
        return self.forward_flops(seq_len=seq_len) + self.backward_flops(seq_len=seq_len)

    def forward_flops(self, *, seq_len: int) -> float:
        """2 for each element of each product."""
        return self.block_flops(seq_len=seq_len) + self.head_flops()

    def block_flops(self, *, seq_len: int) -> float:
        """Of a forward, what the blocks do: gradient checkpointing does it once more."""
        return sum(_forward(weight) for weight in self.weights if weight.block) + 2 * seq_len * sum(self.attention)

    def head_flops(self) -> float:
        """Of a forward, what is outside the blocks: a loss in several chunks does it once more."""
        return sum(_forward(weight) for weight in self.weights if not weight.block)

    def tiled_flops(self, *, checkpointing: bool) -> float:
        """Of a forward, what is computed once more where tiles run on pieces, beside the recomputation of blocks."""
        return sum(_forward(weight) for weight in self._tiled(checkpointing=checkpointing))

    def tiled_widths(self, *, checkpointing: bool) -> float:
        """Of that, as `widths`."""
        return _widths(self._tiled(checkpointing=checkpointing))

    def _tiled(self, *, checkpointing: bool) -> list[Weight]:
        inside = tuple(f"{name}." for name in (self.tiles_again if checkpointing else self.tiles))
        return [weight for weight in self.weights if weight.name.startswith(inside)]

    def backward_flops(self, *, seq_len: int) -> float:
        """2 for an element's gradient where it is trained, 2 more for its input's where something before it is.

        Attention's counts wherever its block holds something that is trained.
        """
        total, reached = 0.0, False
        blocks = iter(self.attention)
        units: dict[str, list[Weight]] = {}
        for weight in self.weights:
            units.setdefault(weight.unit, []).append(weight)
        for held in units.values():
            inside = reached or any(weight.trainable and weight.scales for weight in held)
            for weight in held:
                before = inside or weight.uses > 1  # a tied head comes last, after all that is trained
                total += _forward(weight) * (weight.trainable + before)
                inside = inside or weight.trainable
            reached = inside
            if held[0].block:
                total += 4 * seq_len * next(blocks, 0) * reached
        return total


def _forward(weight: Weight) -> float:
    return 2 * weight.products * weight.numel


def _widths(weights: Iterable[Weight]) -> float:
    return sum(w.products * sum(w.shape[-2:]) * math.prod(w.shape[:-2]) for w in weights)


def estimated(shape: ModelShape, item_bytes: int) -> Activations:
    """For an architecture that does not run without values: 1.8 times the inputs and outputs of the blocks' products.

    Counted ones keep 1.2 (Llama) to 2.1 times as much, without attention's matrices, and a third more for a moment.
    Masks between documents are added.
    """
    e, states = item_bytes, Growth(token=item_bytes * shape.hidden)
    mask = e if shape.packed else 0  # as attention takes it, in each block
    kept = Growth(token=1.8 * e * shape.widths / max(1, shape.layers), pair=mask)
    largest = max((weight.numel for weight in shape.weights if weight.block), default=0)
    head = e * shape.vocabulary * shape.hidden
    return Activations(
        before=states + Growth(pair=2 if shape.packed else 0),  # full and windowed, a byte each
        kinds=(Part(kept, (kept,), (kept + Growth(fixed=e * largest, token=0.3 * kept.token),)),),
        blocks=(0,) * shape.layers,
        hidden=states,
        norm=Part(states, (states + states,), (states + states,)),
        head=Part(Growth(), (), (Growth(token=12 * shape.vocabulary), Growth(fixed=head, token=e * shape.vocabulary))),
        embedding=(Growth(fixed=head) + states + states,),
    )
