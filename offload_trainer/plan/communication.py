"""The bytes that ranks exchange in a step, and the seconds that they wait. Pure arithmetic.

First come the ranks of the tiered engine, then the collectives of stock ZeRO and of tensor parallelism. Ranks of a
tensor group are adjacent; then come those with different rows.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from offload_trainer.common.units import format_bytes
from offload_trainer.plan.machine import MachineProfile, Rate
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.step_time import PHASES, Bound, Traffic
from offload_trainer.plan.tiered.layout import DEVICE, Place, TierMap, Unit, range_of_rank, rank_of
from offload_trainer.plan.tiers import on_drive
from offload_trainer.plan.workload import Workload

STEP_BARRIERS = 5  # barriers per step in addition to those of units: targets, losses, sums, norm, step
OUTBOX, NETWORK, GPUS = "outboxes", "network", "gpus"


@dataclass(frozen=True)
class CommCost:
    """Communication of one node in a step: bytes by link and phase, and the numbers of barriers and gathers."""

    links: tuple[Traffic, ...]
    sums: int  # bytes of memory that adding gradients in the backward reads and writes
    barriers: int
    gathers: int

    def bytes(self, place: str, phase: str) -> tuple[int, int]:
        """Return (read, written) of a link in a phase; for the network and the GPUs, (received, sent)."""
        found = [one for one in self.links if (one.place, one.phase) == (place, phase)]
        return sum(one.read for one in found), sum(one.written for one in found)


def exchange_of(work: Workload, homes: TierMap, *, by_parts: Mapping[str, tuple[int, int]], node: int = 0) -> CommCost:
    """Return what the ranks of node `node` move in a step in which every weight has a gradient; all 0 for one rank.

    `by_parts`: weights that each device receives by all-gather, from `gathered_weights`. Gradients are added in the
    order that a single rank would use, so nothing is reduced before it is sent. Not counted are the messages of norms
    (on average 2 MB for each border between ranks in a unit) and those at the start of a step: up to 7 % of a step for
    small models on two nodes. Of pipelines only the ranks that compute a unit exchange its gradients.
    """
    if work.world == 1:
        return CommCost((), sums=0, barriers=0, gathers=0)
    e, here, remote = work.item_bytes, work.here, work.world - work.here
    micro = work.accumulate * (work.world > work.pipeline)  # the ranks of one pipeline have gradients of their own only
    givers, away = here // work.pipeline, remote // work.pipeline  # ranks with gradients of a unit
    every = own = whole = held = on_gpus = weights = barriers = 0  # elements of all ranks, of this node; with padding
    trained = [unit for unit in homes.units if unit.trained]
    for unit in trained:
        first, end_of_one = range_of_rank(unit, node * here, ranks=work.world)
        _, end = range_of_rank(unit, node * here + here - 1, ranks=work.world)
        for place in unit.places:
            if place.weight.trainable:
                weights += 1
                every += place.weight.numel
                own += max(0, min(end, place.start + place.weight.numel) - max(first, place.start))
        whole += unit.trained
        held += end - first
        # One for each micro-batch, and one for the norms of sums on drives.
        barriers += micro + on_drive(homes.gradients[unit.index])
        if homes.weights[unit.index] == DEVICE:
            on_gpus += unit.trained - (end_of_one - first)
    links = [  # Each rank writes its gradients, and each owner reads its shard of them all.
        Traffic(OUTBOX, "backward", read=micro * givers * e * own, written=micro * givers * e * every),
        Traffic(GPUS, "update", read=e * on_gpus, written=0),  # new weights that are placed on the device
        *(Traffic(GPUS, phase, others, others) for phase, (_, others) in by_parts.items()),
    ]
    if remote:
        marks = micro * givers * away * weights  # flags from each rank to each: which weights have a gradient
        given, taken = micro * givers * e * (whole - held), micro * away * e * held
        links.append(Traffic(NETWORK, "backward", read=taken + marks, written=given + marks))
        links.append(Traffic(NETWORK, "update", read=e * (whole - held), written=e * (work.nodes - 1) * held))
    # A sum in RAM is written once, then read and written for each further gradient; a gather ends each unit's update.
    sums = work.gradient_bytes * own * (2 * work.added - 1) if micro else 0
    moving = tuple(one for one in links if one.read or one.written)
    barriers = STEP_BARRIERS + (barriers // work.pipeline if micro else 0)
    return CommCost(moving, sums=sums, barriers=barriers, gathers=len(trained))


def bounds_of(moved: CommCost, work: Workload, machine: MachineProfile) -> tuple[list[Bound], list[Bound]]:
    """Return the waits that add to a phase's slowest bound, and the transfers that overlap its computation.

    The autograd thread waits for a unit's gradients, for the other ranks and for the additions. Gradients and new
    weights on the network overlap the next unit. In a barrier rank 0 receives a message of each other rank and answers.
    """
    if work.world == 1:
        return [], []

    def messages(phase: str, count: int, *, ways: int = 2, others: int = work.world - 1) -> list[Bound]:
        message = machine.links.message
        if message is None or count == 0:
            return []
        return [Bound(phase, _over(count * ways * others, message), f"{count} barriers", "meeting")]

    # Gradients of other nodes are written to RAM before they are added.
    size = moved.sums + moved.bytes(OUTBOX, "backward")[0] + 2 * moved.bytes(NETWORK, "backward")[0]
    what = f"{format_bytes(size)} in RAM to add the ranks' gradients"
    waits = [Bound("backward", _over(size, machine.rates.memory), what, "memory")] if size else []
    owners = work.world // work.pipeline - 1  # other owners of a unit, one in each other pipeline
    waits += messages("backward", moved.barriers - STEP_BARRIERS, others=owners) + messages("update", STEP_BARRIERS)
    hidden = [one for phase in PHASES for one in _over_network(moved.bytes(NETWORK, phase), machine, phase=phase)]
    to_gpus, _ = moved.bytes(GPUS, "update")
    if machine.gpu is not None and to_gpus:
        hidden.append(_between_gpus(to_gpus, machine, phase="update", what="of updated weights to each GPU"))
    return waits, hidden + messages("update", moved.gathers, ways=1)


def _over(size: int, rate: Rate | None) -> float | None:
    return None if rate is None else size / rate.value


def _over_network(ways: tuple[int, int], machine: MachineProfile, *, phase: str) -> list[Bound]:
    """Return the bound of simultaneous receiving and sending over a full-duplex network."""
    what = f"{format_bytes(ways[0])} from other nodes, {format_bytes(ways[1])} to them"
    return [Bound(phase, _over(max(ways), machine.links.network), what, "network")] if any(ways) else []


def _between_gpus(size: int, machine: MachineProfile, *, phase: str, what: str) -> Bound:
    """Return the bound of `size` bytes over the links between GPUs, or through host memory if there are none."""
    rate = machine.links.between_gpus or machine.links.all_gather or machine.rates.both_ways
    return Bound(phase, _over(size, rate), f"{format_bytes(size)} {what}", "gpus")


# -- collectives of stock ZeRO and of tensor parallelism


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step."""

    phase: str
    bytes: float  # total bytes each way through each GPU
    group: int  # ranks per group
    stride: int  # rank distance between neighbours of a group
    hides: bool = False  # it overlaps the phase's products

    def network(self, here: int) -> float:
        """Return the bytes each way through the network of a node with `here` ranks, which `stride` rings cross."""
        return self.bytes * min(self.stride, here) if self.group * self.stride > here else 0.0


def zero_collectives(
    work: Workload, *, stage: int, trained: float, gathered: Mapping[str, int]
) -> Iterator[Collective]:
    """Yield ZeRO's collectives of a rank with `trained` trained weights; `gathered`: by ZeRO-3, in each phase.

    ZeRO-1 reduces gradients once, ZeRO-2 and 3 once a micro-batch (Rajbhandari et al. 2020, section 7). DeepSpeed would
    all-reduce whole buckets (0.19.8, stage_1_and_2.py, `average_tensor`), which engine/deepspeed.py avoids. The plan
    lets all of ZeRO-1's overlap, although only the last micro-batch's do.
    """
    alike = work.data  # ranks with the same weights
    if alike == 1:
        return
    size, micro, stride = (alike - 1) / alike * work.item_bytes, work.accumulate, work.tensor
    for phase, count in gathered.items():
        hides = phase != "update"
        yield Collective(phase, (micro if hides else 1) * size * count, alike, stride, hides)
    yield Collective("backward", (1 if stage == 1 else micro) * size * trained, alike, stride, hides=True)
    if stage < 3:
        yield Collective("update", size * trained, alike, stride)


def tensor_collectives(work: Workload) -> Iterator[Collective]:
    """Yield the all-reduces of tensor parallelism on each rank.

    The forward has 2 per block (Shoeybi et al. 2019, section 3). The backward has one per column-split product, since
    DeepSpeed's AutoTP reduces each product's input gradient separately (Megatron: 2). Recomputation adds 1, as it stops
    at the last tensor that autograd saves.
    """
    if work.tensor == 1:
        return
    again, blocks = int(work.checkpointed > 0), work.accumulate * work.shape.layers
    each = 2 * (work.tensor - 1) / work.tensor * work.item_bytes * work.micro_batch * work.seq_len * work.shape.hidden
    for phase, count in (("forward", 2), ("backward", column_products(work.shape) + again)):
        yield Collective(phase, blocks * count * each, work.tensor, 1)


def link_seconds(one: Collective, machine: MachineProfile, *, here: int) -> float | None:
    """Return the seconds of a collective, or None if a rate is unknown. Transfers within and between nodes overlap."""
    inside = machine.links.between_gpus or machine.links.all_gather or machine.rates.both_ways
    ways = (one.bytes * (here > 1), inside), (one.network(here), machine.links.network)
    if any(size and rate is None for size, rate in ways):
        return None
    return max(size / rate.value if rate else 0.0 for size, rate in ways)


def as_traffic(moved: Iterable[Collective], *, here: int) -> Iterator[Traffic]:
    """Yield the bytes of each phase through each GPU, and through each node's network."""
    found = defaultdict[tuple[str, str], float](float)
    for one in moved:
        found[GPUS, one.phase] += one.bytes
        found[NETWORK, one.phase] += one.network(here)
    yield from (Traffic(place, phase, round(size), round(size)) for (place, phase), size in found.items() if size)


def zero_bounds(moved: Iterable[Collective], machine: MachineProfile, *, here: int) -> Iterator[Bound]:
    """Yield the bounds of the collectives that overlap matrix products; none on a CPU, where no rate is known."""
    for one in as_traffic((each for each in moved if each.hides), here=here) if machine.gpu is not None else ():
        if one.place == NETWORK:
            yield from _over_network((one.read, one.written), machine, phase=one.phase)
        else:
            yield _between_gpus(one.read, machine, phase=one.phase, what="gathered and scattered by each GPU")


def refusal(shape: ModelShape, *, tensor: int) -> str:
    """Return why the products of a model cannot be divided over `tensor` ranks, or "" if they can."""
    if tensor > 1 and any(weight.block and len(weight.shape) > 2 for weight in shape.weights):
        return "its experts are stored in one tensor, which cannot be split by rows or columns"
    for count, kind in ((shape.heads, "attention"), (shape.key_heads, "key-value")):
        if count % tensor:
            return f"{count} {kind} heads are not a multiple of {tensor}"
    return ""


def part_held(weight: Weight, tensor: int) -> int:
    """Return the elements of a weight on one rank of a tensor-parallel group; embeddings and head are whole."""
    divided = weight.block and (weight.split in ("column", "row") or len(weight.shape) > 1)
    return -(-weight.numel // tensor) if divided else weight.numel


def column_products(shape: ModelShape) -> int:
    """Return the most column-split matrices in a block. If splits are unknown, assume that all but two are."""
    matrices = [weight for weight in shape.weights if len(weight.shape) > 1]
    if counts := Counter(weight.unit for weight in matrices if weight.split == "column"):
        return max(counts.values())
    counts = Counter(weight.unit for weight in matrices if weight.block and weight.products)
    return max(0, max(counts.values(), default=0) - 2)


# -- the gradient norm of a weight: it is computed from pieces of fixed size, counted from the weight's start, so that
# its bits do not depend on the number of ranks. A rank sends its later part of a piece to the one where it begins.

_PIECE = 1 << 17  # elements of a piece on a CPU
_CHUNK = 1 << 20  # elements of a piece for a GPU, whose squares are summed pairwise

Part = tuple[int, int, int]  # rank, and elements [first, end) of the unit in that rank's range


def piece_width(numel: int, *, ordered: bool) -> int:
    """Return the elements per piece for a weight of `numel` elements; `ordered`: the norm is computed for a GPU."""
    return min(_CHUNK, 1 << max(0, numel - 1).bit_length()) if ordered else _PIECE


@dataclass(frozen=True)
class NormShards:
    """The part of one weight's norm that one rank computes. Elements are counted from the unit's start."""

    starts: range  # starts of the pieces that begin in its range
    has: int  # end of the weight's part in its range
    gives: Part | None  # the part that it sends to an earlier rank
    gets: tuple[Part, ...]  # the parts that it receives from later ranks


def norm_parts(unit: Unit, place: Place, *, width: int, rank: int, ranks: int) -> NormShards:
    """Return the share of `rank` in a weight's norm with pieces of `width` elements."""

    def within(rank: int, end: int) -> Part:
        first, end_of_rank = range_of_rank(unit, rank, ranks=ranks)
        first = max(first, place.start)
        return rank, first, max(first, min(end_of_rank, end))

    _, first, has = within(rank, place.start + place.weight.numel)
    starts = range(first + (place.start - first) % width, has, width)
    before = first - (first - place.start) % width  # the start of the piece that its range begins in
    cut = before < first < has
    gives = (rank_of(unit, before, ranks=ranks), first, min(has, before + width)) if cut else None
    stop = min(starts[-1] + width, place.start + place.weight.numel) if starts else has  # end of its last piece
    later = (within(other, stop) for other in range(rank + 1, ranks))
    return NormShards(starts, has, gives, gets=tuple(part for part in later if part[1] < part[2]))
