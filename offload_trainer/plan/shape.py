"""A model described by its counts (weights, widths, floating-point operations), which is all that planning needs.

`model/shape.py` fills these classes from a transformers model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import add, sub
from typing import Literal

LOSS_PIECES = 32  # the most parts of the rows that the loss computes in fp32, one at a time
# Bytes of logits in fp32 that a GPU's loss computes at a time. A kernel takes 40 us for so many on an H100, and a
# launch takes 5, so that larger pieces would only need more memory.
_LOSS_PIECE = 64 << 20


@dataclass(frozen=True)
class Growth:
    """Bytes as a polynomial of the rows of a micro-batch and the tokens of a row."""

    fixed: float = 0.0  # gradients of weights, until the engine takes them
    row: float = 0.0  # per row
    position: float = 0.0  # per token of a row, for any number of rows
    token: float = 0.0
    square: float = 0.0  # per pair of tokens, for any number of rows: masks
    pair: float = 0.0  # per pair of tokens in each row: attention matrices

    def at(self, rows: int, length: int, *, gradients: bool = True) -> int:
        """Return the bytes for `rows` of `length` tokens; `gradients=False` leaves out the fixed part."""
        ones = self.fixed * gradients + self.row * rows
        return int(ones + length * (self.position + self.token * rows + length * (self.square + self.pair * rows)))

    def values(self) -> tuple[float, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Growth) -> Growth:
        return Growth(*map(add, self.values(), other.values()))

    def __sub__(self, other: Growth) -> Growth:
        return Growth(*map(sub, self.values(), other.values()))


@dataclass(frozen=True)
class Part:
    """A block, the norm after the blocks, or the head. Moments count memory in addition to what earlier parts keep."""

    kept: Growth  # memory kept from its forward until its backward
    forward: tuple[Growth, ...]  # moments of its forward that can be the peak
    backward: tuple[Growth, ...]  # moments of its backward, including what its forward kept and its output's gradient

    def each(self, changed: Callable[[Growth], Growth]) -> Part:
        """Return the part with other terms in each of its moments."""
        return Part(changed(self.kept), tuple(map(changed, self.forward)), tuple(map(changed, self.backward)))


@dataclass(frozen=True)
class Activations:
    """The moments of all parts of a model in the run's dtype, during training."""

    before: Growth  # allocated before the first block: its input, rotary tables, masks
    kinds: tuple[Part, ...]  # distinct kinds of blocks
    blocks: tuple[int, ...]  # the kind of each block
    hidden: Growth  # hidden states between blocks
    norm: Part
    head: Part  # one chunk of the loss: a row with that many tokens
    embedding: tuple[Growth, ...]  # moments of the embedding's backward, in total
    images: Part | None = None  # the parts that only images pass through; their moments include what they keep


def pruned(moments: Sequence[Growth]) -> tuple[Growth, ...]:
    """Return the moments that no other moment dominates for every number of rows and tokens."""
    kept: list[Growth] = []
    for moment in sorted(set(moments), key=Growth.values, reverse=True):
        values = moment.values()
        if not any(all(a >= b for a, b in zip(other.values(), values, strict=True)) for other in kept):
            kept.append(moment)
    return tuple(kept)


def unit_of(name: str, blocks: Iterable[str]) -> tuple[str, bool]:
    """Return the unit of a parameter (its block, or else its module), and whether that is one of the blocks."""
    block = next((block for block in blocks if name.startswith(f"{block}.")), None)
    return block or name.rpartition(".")[0], block is not None


# How tensor parallelism splits a weight. "column": by output features; "row": by input features; "summed": the weight
# is replicated and each rank computes part of its gradient; "": replicated, or unknown.
Split = Literal["", "column", "row", "summed"]


@dataclass(frozen=True)
class Weight:
    """One parameter tensor. Tied parameters are one weight."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    unit: str = ""  # name of the block that contains it, or of its module outside the blocks
    block: bool = False  # the unit is one of the repeated blocks
    uses: int = 1  # number of modules that use it: 2 for tied embeddings
    spared: bool = False  # a bias or a norm's weight that is not a vector; excluded from weight decay
    split: Split = ""
    quantised: str = ""  # the format that a frozen weight is stored in (`plan/tiered/layout.py`); "": its dtype
    # Matrix products per token: 0 for a norm or an embedding that is only looked up, 1/4 for 2 of 8 experts.
    products: float = 1.0

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Return whether weight decay applies: to matrices and embeddings, not to biases, norms or other vectors."""
        return len(self.shape) > 1 and not self.spared

    @property
    def matrix(self) -> tuple[int, int] | None:
        """Return the shape of the matrices that an update rule on whole matrices (Muon) treats as such, or None."""
        return self.block_matrix if self.trainable else None

    @property
    def block_matrix(self) -> tuple[int, int] | None:
        """Return the shape of a matrix of a block that takes part in products, or None for other weights.

        Of a weight that stacks the matrices of all experts it is the shape of each. Embeddings, heads, vectors and
        convolutions are other weights.
        """
        if not (self.block and self.decays and self.products):
            return None
        if len(self.shape) == 2:
            return self.shape[0], self.shape[1]
        return self.shape[1:] if len(self.shape) == 3 and ".experts." in self.name else None

    @property
    def scales(self) -> bool:
        """Return whether this is the scale of a norm, which is applied before its unit's matrices."""
        return len(self.shape) == 1 and not self.name.endswith("bias")


def decay_groups(weights: Sequence[Weight]) -> tuple[list[Weight], list[Weight]]:
    """Return the trainable weights with and without weight decay, in the model's order."""
    trainable = [weight for weight in weights if weight.trainable]
    return [w for w in trainable if w.decays], [w for w in trainable if not w.decays]


@dataclass(frozen=True)
class Order:
    """The order in which a pass uses blocks and modules outside them, by name. Each may occur several times."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]


@dataclass(frozen=True)
class ImageParts:
    """The parts of a model that only images pass through: a vision tower and its projector."""

    units: tuple[str, ...]  # names of their units, in the order of registration; empty: no such part is known
    least: int  # patches of one image
    per_token: float  # patches for each token of a row, if all of them stand for images
    why: str  # the origin of these numbers, for the plan
    hidden: int = 0  # width of the hidden states between the tower's blocks
    eager_heads: int = 0  # attention heads of a block that stores its attention matrices; 0: fused attention
    masked: bool = True  # a mask separates a row's images
    layers: tuple[str, ...] = ()  # the units that activation checkpointing applies to
    rate: float = 1.0  # patches per token of a row that the weights' `products` and the attention count

    def patches(self, seq_len: int) -> int:
        """Return the patches of a row's images, before the model merges any."""
        return max(self.least, math.ceil(self.per_token * seq_len))

    def frozen(self, weights: Iterable[Weight]) -> tuple[str, ...]:
        """Return the units before the first trained one, which need no backward.

        There are none if no weight of the model is trained, since adapters may be anywhere.
        """
        trained = {weight.unit for weight in weights if weight.trainable}
        first = next((place for place, unit in enumerate(self.units) if unit in trained), len(self.units))
        return self.units[:first] if trained else ()


@dataclass(frozen=True)
class ModelShape:
    """Counts of a causal language model, its parameters in the model's own order."""

    weights: tuple[Weight, ...]
    layers: int
    hidden: int
    vocabulary: int
    context: int
    attention: tuple[int, ...] = ()  # heads x (key size + value size) of each block
    heads: int = 0  # attention heads; 0: unknown
    key_heads: int = 0  # key and value heads; fewer than `heads` with grouped-query attention
    on_gpu: Activations | None = None  # activation memory with GPU kernels; None: it could not be counted
    on_cpu: Activations | None = None  # activation memory with CPU kernels
    order: Order | None = None  # None: unknown, or the order of registration (`plan/tiered/weight_streaming.py`)
    can_checkpoint: bool = True  # the architecture supports activation checkpointing
    can_checkpoint_some: bool = False  # the first N blocks can be checkpointed for any N, not only all or none
    whole_logits: bool = False  # the loss needs the logits of a whole micro-batch
    packed: bool = False  # a mask separates the documents of a row
    images: ImageParts | None = None  # rows hold images; None: text alone
    no_chain: str = ""  # why micro-batches cannot pass through the blocks one block at a time; "": they can
    notes: tuple[str, ...] = ()  # sentences that the plan prints about the model

    @property
    def parameters(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def trainable(self) -> int:
        return sum(weight.numel for weight in self.weights if weight.trainable)

    @property
    def base_format(self) -> str:
        """Return the format of frozen weights that are stored quantised (`model.base`); "": there are none."""
        return next((weight.quantised for weight in self.weights if weight.quantised), "")

    @property
    def blocks(self) -> tuple[str, ...]:
        """Return the names of the blocks in the model's order, which is that of `attention`."""
        return tuple(dict.fromkeys(weight.unit for weight in self.weights if weight.block))

    @property
    def largest(self) -> int:
        return max(weight.numel for weight in self.weights)

    @property
    def widths(self) -> int:
        """Return the input and output elements per token of all matrix products in the blocks.

        If no blocks are known, count all weights that are neither an embedding nor a head.
        """
        inside = [w for w in self.weights if w.block] or [w for w in self.weights if self.vocabulary not in w.shape]
        return int(sum(w.products * sum(w.shape[-2:]) * math.prod(w.shape[:-2]) for w in inside))

    def by_unit(self) -> dict[str, list[Weight]]:
        """Return the weights of each block, and of each module outside the blocks, in the model's order."""
        units: dict[str, list[Weight]] = {}
        for weight in self.weights:
            units.setdefault(weight.unit, []).append(weight)
        return units

    def without(self, units: Collection[str]) -> ModelShape:
        """Return the shape without the weights and the attention of these units; `layers` is unchanged."""
        weights = tuple(weight for weight in self.weights if weight.unit not in units)
        attention = (width for block, width in zip(self.blocks, self.attention, strict=False) if block not in units)
        return replace(self, weights=weights, attention=tuple(attention))

    # -- floating-point operations of one token's matrix products. Attention is counted over the whole row, although
    # the mask hides half of it (Chowdhery et al. 2022, PaLM, appendix B).

    def flops_per_token(self, *, seq_len: int) -> float:
        """Return the operations of forward and backward. Recomputation does not count, as is usual for MFU."""
        return self.block_flops(seq_len=seq_len) + self.head_flops() + self.backward_flops(seq_len=seq_len)

    def block_flops(self, *, seq_len: int) -> float:
        """Return the blocks' part of the forward, which checkpointing repeats: 2 for each element of each product."""
        return sum(_forward(weight) for weight in self.weights if weight.block) + 2 * seq_len * sum(self.attention)

    def head_flops(self) -> float:
        """Return the part of the forward outside the blocks, which a loss in several chunks repeats."""
        return sum(_forward(weight) for weight in self.weights if not weight.block)

    def backward_flops(self, *, seq_len: int) -> float:
        """Return the operations of the backward.

        A weight costs 2 per element if it is trained, and 2 more for the gradient of its input if anything before it is
        trained. Attention counts if its block, or anything before it, is trained.
        """
        total, reached = 0.0, False
        blocks = iter(self.attention)
        for held in self.by_unit().values():
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


KEPT = 1.8  # estimate of what a block keeps, as a multiple of the inputs and outputs of its matrix products


def loss_pieces(vocabulary: int, *, chunk: int, gpu: bool) -> int:
    """Return the number of pieces in which the loss computes the rows of a chunk (`optim/cross_entropy.py`).

    A CPU's caches want many, while a GPU wants few, since each has a dozen kernels. The plan asks this function as the
    loss does. It looks at the model and `model.loss_chunk` and never at free memory, so that a run that resumes
    elsewhere or with another placement computes the same bits.
    """
    least = math.ceil(4 * vocabulary * chunk / _LOSS_PIECE) if gpu else LOSS_PIECES
    return min(1 << (least - 1).bit_length(), LOSS_PIECES)  # a power of two, which divides most numbers of rows


def estimated(shape: ModelShape, item_bytes: int, *, pieces: int) -> Activations:
    """Estimate activation memory for an architecture that cannot run on meta tensors; `pieces`: of the loss.

    Count `KEPT` times the inputs and outputs of the blocks' matrix products, and a third more at the peak.
    Architectures that can be counted keep 1.2 (Llama) to 2.1 times as much, without attention matrices.
    """
    e, states = item_bytes, Growth(token=item_bytes * shape.hidden)
    mask = e if shape.packed else 0  # each block's attention holds the mask in its own dtype
    text = shape.without(shape.images.units if shape.images else ())  # `image_part` counts the parts for images
    kept = Growth(token=KEPT * e * text.widths / max(1, shape.layers), pair=mask)
    largest = max((weight.numel for weight in text.weights if weight.block), default=0)
    head = e * shape.vocabulary * shape.hidden
    loss = (2 * e + 3 * 4 / pieces) * shape.vocabulary  # logits, their gradient, and three pieces in fp32
    return Activations(
        before=states + Growth(pair=2 if shape.packed else 0),  # a full and a windowed mask of 1 byte per element each
        kinds=(Part(kept, (kept,), (kept + Growth(fixed=e * largest, token=0.3 * kept.token),)),),
        blocks=(0,) * shape.layers,
        hidden=states,
        norm=Part(states, (states + states,), (states + states,)),
        head=Part(Growth(), (), (Growth(token=loss), Growth(fixed=head, token=e * shape.vocabulary))),
        embedding=(Growth(fixed=head) + states + states,),
    )
