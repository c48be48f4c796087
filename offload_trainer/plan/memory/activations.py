"""Compute the peak of activation memory in a forward and backward from the counts of a model's parts.

    embedding | block 0 | block 1 | ... | norm | head, chunk by chunk      then backwards

Each part of a model has moments at which its memory may be largest, in bytes that grow with rows and tokens. The peak
is the maximum over all moments of all parts, each added to what earlier parts keep. Adding up each part's maximum would
count tensors that never exist at the same time. `model/meta/activations.py` records the moments of any architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import add, sub


@dataclass(frozen=True)
class Growth:
    """Bytes as a polynomial of the rows of a micro-batch, the tokens of a row, and the tokens of a piece."""

    fixed: float = 0.0  # gradients of weights, until the engine takes them
    row: float = 0.0  # per row
    position: float = 0.0  # per token of a row, for any number of rows
    token: float = 0.0
    square: float = 0.0  # per pair of tokens, for any number of rows: masks
    pair: float = 0.0  # per pair of tokens in each row: attention matrices
    piece: float = 0.0  # per token of a piece, if part of a block runs on pieces of the micro-batch

    def at(self, rows: int, length: int, *, gradients: bool = True, piece: int = 0) -> int:
        """Return the bytes for `rows` of `length` tokens; `gradients=False` leaves out the fixed part."""
        ones = self.fixed * gradients + self.row * rows + self.piece * min(piece, rows * length)
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


@dataclass(frozen=True)
class Peak:
    """The moment with the most memory: what blocks keep, everything else, and a description."""

    kept: int  # inputs (with checkpointing) or activations of the preceding blocks
    rest: int
    when: str

    @property
    def bytes(self) -> int:
        return self.kept + self.rest


def peak_of(
    counted: Activations,
    *,
    rows: int,
    length: int,
    chunk: int,
    checkpointing: bool,
    inputs_here: bool = True,
    keepers: int = 1,
    gradients: bool = True,
    waiting: int = 0,
    piece: int = 0,
) -> Peak:
    """Return the peak of a micro-batch on the device, in bytes and without weights.

    Args:
        counted: the model's moments.
        rows: rows of the micro-batch.
        length: tokens in a row.
        chunk: tokens of one chunk of the loss.
        checkpointing: blocks are checkpointed.
        inputs_here: inputs of checkpointed blocks stay on the device.
        keepers: ranks that each block input is divided over.
        gradients: count weight gradients from their computation until the engine takes them.
        waiting: bytes of a tied head's gradient, which waits for the embedding's.
        piece: tokens of a piece, if `counted` describes blocks that run on pieces.
    """

    def most(moments: Iterable[Growth]) -> int:
        return max((moment.at(rows, length, gradients=gradients, piece=piece) for moment in moments), default=0)

    def now(growth: Growth) -> int:
        return growth.at(rows, length)

    hidden = now(counted.hidden)
    parts = [counted.kinds[kind] for kind in counted.blocks]
    beside = now(counted.before) - hidden
    # Memory kept by the blocks below each block, including its own input. If inputs are offloaded, only its own counts.
    if checkpointing:
        below = _inputs(hidden, blocks=len(parts), keepers=keepers) if inputs_here else [hidden] * (len(parts) + 1)
    else:
        below = [hidden]
        for part in parts:
            below.append(below[-1] + now(part.kept))
    peaks: list[Peak] = []
    forwards = {kind: most(counted.kinds[kind].forward) for kind in set(counted.blocks)}
    backwards = {kind: most(counted.kinds[kind].backward) for kind in set(counted.blocks)}
    for number, kind in enumerate(counted.blocks):
        forward, backward = forwards[kind], backwards[kind] + waiting
        if checkpointing:  # the recomputed forward coexists with the gradient of the block's output
            backward = max(backward, forward + hidden + waiting)
        when = f"in the {'backward' if backward > forward else 'forward'} of block {number}"
        peaks.append(Peak(below[number], beside + max(forward, backward), when))
    top = below[-1]
    norm = counted.norm
    rest = max(most(norm.forward), most(norm.backward) + waiting)
    peaks.append(Peak(top, beside + rest, "in the final norm"))
    head = _head(counted, rows=rows, length=length, chunk=chunk, gradients=gradients)
    peaks.append(Peak(top, beside + now(norm.kept) + head, f"in the loss of {min(chunk, rows * length)} tokens"))
    peaks.append(Peak(0, most(counted.embedding) + waiting, "in the embedding's backward"))
    return max(peaks, key=lambda peak: peak.bytes)


def _inputs(hidden: int, *, blocks: int, keepers: int) -> list[int]:
    """Return the bytes of block inputs at each block, and after the last one; only the current input is undivided."""
    if keepers == 1:
        return [hidden * (number + 1) for number in range(blocks + 1)]
    return [hidden + -(-hidden // keepers) * min(number + 1, blocks) for number in range(blocks + 1)]


def _head(counted: Activations, *, rows: int, length: int, chunk: int, gradients: bool) -> int:
    """Return the head's peak: one forward and backward, or one chunk at a time.

    During the backward of the last chunk, the hidden states' gradients of all other chunks and the sum of the head's
    gradient are in memory. Autograd adds to that sum out of place at least once. Afterwards the chunks are
    concatenated.
    """
    tokens = rows * length
    several = tokens > chunk
    head = counted.head

    def at(moment: Growth) -> int:
        return moment.at(1, min(tokens, chunk), gradients=gradients)

    largest = max(map(at, (*head.forward, *head.backward)))
    if not several:
        return largest
    summed = int(max(moment.fixed for moment in head.backward)) if gradients else 0
    hidden = counted.hidden.at(rows, length)
    last = hidden * (tokens - chunk) // tokens + summed + largest
    return max(last, hidden + 3 * summed, 2 * hidden)


def in_pieces(counted: Activations, *, ranks: int, more: float) -> Activations:
    """Return the moments of one of `ranks` sequence-parallel ranks, for rows as long as its piece.

    Attention is fused, so terms of token pairs are masks, which cover whole rows and exist once. `more` is the bytes
    per token that attention keeps in addition until its block's backward.
    """

    def changed(one: Growth) -> Growth:
        square = (one.square + one.pair) * ranks**2
        return replace(one, position=0.0, token=one.token + one.position, square=square, pair=0.0)

    def part(one: Part, beside: Growth) -> Part:
        forward, backward = (tuple(changed(moment) + beside for moment in each) for each in (one.forward, one.backward))
        return Part(changed(one.kept) + beside, forward, backward)

    return Activations(
        before=changed(counted.before),
        kinds=tuple(part(kind, Growth(token=more)) for kind in counted.kinds),
        blocks=counted.blocks,
        hidden=counted.hidden,
        norm=part(counted.norm, Growth()),
        head=part(counted.head, Growth()),
        embedding=tuple(map(changed, counted.embedding)),
    )


def pruned(moments: Sequence[Growth]) -> tuple[Growth, ...]:
    """Return the moments that no other moment dominates for every number of rows and tokens."""
    kept: list[Growth] = []
    for moment in sorted(set(moments), key=Growth.values, reverse=True):
        values = moment.values()
        if not any(all(a >= b for a, b in zip(other.values(), values, strict=True)) for other in kept):
            kept.append(moment)
    return tuple(kept)
