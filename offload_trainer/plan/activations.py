"""What a forward and a backward hold beside the weights, as counts of a model and the arithmetic over them.

    embedding | block 0 | block 1 | ... | norm | head, chunk by chunk      then backwards

Each part of a model has moments at which it may hold the most, bytes that grow with rows and tokens. A peak is the
largest of all moments of all parts, each on top of what earlier parts have left: a sum of every part's largest would
count what never exists together. `model/activations.py` counts the moments of any architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import add, sub


@dataclass(frozen=True)
class Growth:
    """Bytes, as they grow with the rows of a micro-batch, the tokens of a row, and those of a piece of it."""

    fixed: float = 0.0  # gradients of weights, until they are handed over
    row: float = 0.0
    position: float = 0.0  # a token of a row, however many rows there are
    token: float = 0.0
    square: float = 0.0  # a token with a token, however many rows there are: masks
    pair: float = 0.0  # a token with a token in each row: attention's matrices
    piece: float = 0.0  # a token of a piece, where a part of a block runs on pieces of the micro-batch

    def at(self, rows: int, length: int, *, gradients: bool = True, piece: int = 0) -> int:
        """Bytes for `rows` of `length` tokens; without `gradients` what grows with neither is left out."""
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
    """A block, the norm behind the blocks, or the head. Moments are beyond what was held before its forward."""

    kept: Growth  # from its forward until its backward
    forward: tuple[Growth, ...]  # moments of its forward that can be the largest
    backward: tuple[Growth, ...]  # of its backward, with what its forward kept and its output's gradient


@dataclass(frozen=True)
class Activations:
    """Moments of a model's parts in the run's dtype, as it trains."""

    before: Growth  # held from before the first block on: its input, rotary tables, masks
    kinds: tuple[Part, ...]  # of blocks
    blocks: tuple[int, ...]  # the kind of each
    hidden: Growth  # hidden states between blocks
    norm: Part
    head: Part  # of one chunk: a row of as many tokens
    embedding: tuple[Growth, ...]  # moments of the embedding's backward, all in all


@dataclass(frozen=True)
class Peak:
    """The largest moment: what blocks have kept in it, all else, and which it is."""

    kept: int  # of the blocks before: their inputs, or all of their activations
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
    """Bytes on the device at the largest moment of a micro-batch, without weights.

    `inputs_here`: whether inputs of checkpointed blocks stay on the device; `keepers`: ranks that each of them is
    divided over. `gradients`: whether those of weights are counted, from when they are made until they are handed over.
    `waiting`: of a tied head's, for the embedding's. `piece`: tokens of one, where `counted` is of blocks that run on
    pieces.
    """

    def most(moments: Iterable[Growth]) -> int:
        return max((moment.at(rows, length, gradients=gradients, piece=piece) for moment in moments), default=0)

    def now(growth: Growth) -> int:
        return growth.at(rows, length)

    hidden = now(counted.hidden)
    parts = [counted.kinds[kind] for kind in counted.blocks]
    beside = now(counted.before) - hidden
    # What is kept below each block, its own input included; where inputs leave, only the one that is worked on.
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
        if checkpointing:  # the forward is done again when the output's gradient has come
            backward = max(backward, forward + hidden + waiting)
        when = f"in the {'backward' if backward > forward else 'forward'} of block {number}"
        peaks.append(Peak(below[number], beside + max(forward, backward), when))
    top = below[-1]
    norm = counted.norm
    rest = max(most(norm.forward), most(norm.backward) + waiting)
    peaks.append(Peak(top, beside + rest, "in the norm behind the blocks"))
    head = _head(counted, rows=rows, length=length, chunk=chunk, gradients=gradients)
    peaks.append(Peak(top, beside + now(norm.kept) + head, f"in the loss of {min(chunk, rows * length)} tokens"))
    peaks.append(Peak(0, most(counted.embedding) + waiting, "in the embedding's backward"))
    return max(peaks, key=lambda peak: peak.bytes)


def _inputs(hidden: int, *, blocks: int, keepers: int) -> list[int]:
    """Bytes of them at each block, whole where it is worked on, and behind the last one with that one's output."""
    if keepers == 1:
        return [hidden * (number + 1) for number in range(blocks + 1)]
    return [hidden + -(-hidden // keepers) * min(number + 1, blocks) for number in range(blocks + 1)]


def _head(counted: Activations, *, rows: int, length: int, chunk: int, gradients: bool) -> int:
    """The head's largest moment: forward and backward at once, or a chunk at a time.

    While the last chunk goes back all others' gradients of hidden states wait for it, and their sum of the head's
    gradient. Autograd adds to that out of place, the first time at least. Then the pieces become one.
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
    """What each of `ranks` that share rows holds, of rows as long as a piece.

    Attention is fused, so pairs of tokens are a window's mask: of whole rows, and one for all. Positions are each row's
    own. `more`: bytes a token that attention keeps beside, until its block's backward.
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
    """Those moments that are not below another whatever the rows and tokens."""
    kept: list[Growth] = []
    for moment in sorted(set(moments), key=Growth.values, reverse=True):
        values = moment.values()
        if not any(all(a >= b for a, b in zip(other.values(), values, strict=True)) for other in kept):
            kept.append(moment)
    return tuple(kept)
