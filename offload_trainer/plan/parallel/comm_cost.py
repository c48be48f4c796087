"""Compute the bytes that ranks exchange in a step, per node and link, and the seconds that they wait. Pure arithmetic.

This covers the tiered engine (`offloading/ranks/sharded_gradients.py`, `node_comm.py`); stock ZeRO's bytes are in
`collectives.py`. There are N ranks, n of them on each of K nodes, with a micro-batches each, e bytes per weight and g
per element of the gradient sums. Of a unit, T elements are trained; S of them are updated on this node, and R by one
rank:

    outboxes    a n e T written, a n e S read    each rank writes its gradients; each owner reads its shard of them all
    sums        g S (2 a N - 1)                  in RAM: written once, then read and written per further gradient
    network     a (N - n) e S received           gradients from all ranks of other nodes; a n e (T - S) sent
                a n (N - n) w each way           flags from each rank to each: which of w weights have a gradient
                e (T - S) received               new weights, since each node has all weights; e (K - 1) S sent
    gpus        e (T - R) into each GPU          new weights that are placed on the device
                (n - 1) / n of a fetch           weights in RAM fetched by all-gather (`weight_streaming.py`), each time
    barriers    a U + D + 5                      barriers: one per micro-batch for each of U units, one for each of D
                                                 units whose sums are on drives, for their norms, and five per step:
                                                 targets, losses, sums, norm, step
    gathers     U                                gathers concurrent with the update: a unit is updated on all ranks

Messages of norms (one number for each piece, and the parts of pieces that a border between ranks cuts: on average 2 MB
for each border in a unit) and those at the start of a step are not counted: up to 7 % of a step for small models on two
nodes. Gradients are added in the order that a single rank would use, so nothing is reduced before it is sent. That
takes n times the bytes of a reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.parallel.collectives import Collective
from offload_trainer.plan.step_time import Bound, Traffic
from offload_trainer.plan.tiered.layout import DEVICE, Place, TierMap, Unit, range_of_rank, rank_of
from offload_trainer.plan.tiered.weight_streaming import TransferBytes
from offload_trainer.plan.tiers import on_drive
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes

STEP_BARRIERS = 5  # barriers per step in addition to those of units
OUTBOX, NETWORK, GPUS = "outboxes", "network", "gpus"


@dataclass(frozen=True)
class CommCost:
    """Communication of one node in a step: bytes by link and phase, and the numbers of barriers and gathers.

    `sums` is the memory traffic of adding gradients in the backward, in bytes.
    """

    links: tuple[Traffic, ...]
    sums: int
    barriers: int
    gathers: int

    def bytes(self, place: str, phase: str) -> tuple[int, int]:
        """Return (read, written) of a link in a phase; for the network and the GPUs, (received, sent)."""
        found = [one for one in self.links if (one.place, one.phase) == (place, phase)]
        return sum(one.read for one in found), sum(one.written for one in found)


def exchange_of(
    work: Workload,
    units: Sequence[Unit],
    homes: TierMap,
    *,
    by_parts: Mapping[str, TransferBytes] | None = None,
    node: int = 0,
) -> CommCost:
    """Return what the ranks of node `node` move in a step in which every weight has a gradient; all 0 for one rank.

    `by_parts`: weights that each device receives by all-gather, by phase.
    """
    if work.world == 1:
        return CommCost((), sums=0, barriers=0, gathers=0)
    e, micro, here, remote = work.item_bytes, work.accumulate, work.here, work.world - work.here
    every = own = whole = held = on_gpus = weights = 0
    for unit in units:
        first, _ = range_of_rank(unit, node * here, ranks=work.world)
        _, end = range_of_rank(unit, node * here + here - 1, ranks=work.world)
        for place in unit.places:
            if place.weight.trainable:
                weights += 1
                every += place.weight.numel
                own += max(0, min(end, place.start + place.weight.numel) - max(first, place.start))
        whole += unit.trained
        held += end - first
        if homes.weights[unit.index] == DEVICE:
            mine = range_of_rank(unit, node * here, ranks=work.world)
            on_gpus += unit.trained - (mine[1] - mine[0])
    links = [
        Traffic(OUTBOX, "backward", read=micro * here * e * own, written=micro * here * e * every),
        Traffic(GPUS, "update", read=e * on_gpus, written=0),
        *(Traffic(GPUS, phase, size.from_others, size.from_others) for phase, size in (by_parts or {}).items()),
    ]
    if remote:
        marks = micro * here * remote * weights
        given, taken = micro * here * e * (whole - held), micro * remote * e * held
        links.append(Traffic(NETWORK, "backward", read=taken + marks, written=given + marks))
        links.append(Traffic(NETWORK, "update", read=e * (whole - held), written=e * (work.nodes - 1) * held))
    sums = work.gradient_bytes * own * (2 * work.added - 1)
    turns = [unit for unit in units if unit.trained]
    barriers = micro * len(turns) + sum(on_drive(homes.gradients[unit.index]) for unit in turns) + STEP_BARRIERS
    moving = tuple(one for one in links if one.read or one.written)
    return CommCost(moving, sums=sums, barriers=barriers, gathers=len(turns))


def as_traffic(moved: Iterable[Collective], *, here: int) -> Iterator[Traffic]:
    """Yield the bytes of each phase through each GPU, and through each node's network."""
    found: dict[tuple[str, str], float] = {}
    for one in moved:
        for place, size in ((GPUS, one.bytes), (NETWORK, one.network(here))):
            if size:
                found[place, one.phase] = found.get((place, one.phase), 0.0) + size
    for (place, phase), size in found.items():
        yield Traffic(place, phase, round(size), round(size))


def waits(moved: CommCost, work: Workload, machine: MachineProfile) -> list[Bound]:
    """Return the waits that add to a phase's slowest bound.

    The autograd thread waits for a unit's gradients, for the other ranks and for the additions before it continues.
    Gradients on the network may take until the next unit's gradients are complete, and new weights until the last ones
    are computed, so those overlap (`hidden_waits`).
    """
    if work.world == 1:
        return []
    rate = machine.rates.memory  # gradients of other nodes are written to RAM before they are added
    size = moved.sums + moved.bytes(OUTBOX, "backward")[0] + 2 * moved.bytes(NETWORK, "backward")[0]
    what = f"{format_bytes(size)} in RAM to add the ranks' gradients"
    bounds = [Bound("backward", None if rate is None else size / rate.value, what, "memory")]
    barriers = {"backward": moved.barriers - STEP_BARRIERS, "update": STEP_BARRIERS}
    return bounds + [
        bound for phase, count in barriers.items() for bound in _latencies(count, work, machine, phase=phase)
    ]


def hidden_waits(moved: CommCost, work: Workload, machine: MachineProfile) -> list[Bound]:
    """Return the transfers that overlap a phase's computation: gradients on the network, and units' new weights."""
    bounds = [*_over_network(moved.bytes(NETWORK, "backward"), machine, phase="backward")]
    bounds += _over_network(moved.bytes(NETWORK, "update"), machine, phase="update")
    to_gpus, _ = moved.bytes(GPUS, "update")
    if machine.gpu is not None and to_gpus:
        bounds.append(_between_gpus(to_gpus, machine, phase="update", what="of updated weights to each GPU"))
    return bounds + _latencies(moved.gathers, work, machine, phase="update", ways=1)


def _latencies(count: int, work: Workload, machine: MachineProfile, *, phase: str, ways: int = 2) -> list[Bound]:
    """Return the seconds of `count` barriers (`ways=2`) or gathers (`ways=1`); empty if the latency is unknown.

    In a barrier rank 0 receives a message from each other rank in turn, and then answers each in turn.
    """
    message = machine.links.message
    if message is None or count == 0:
        return []
    return [Bound(phase, count * ways * (work.world - 1) * message.seconds, f"{count} barriers", "meeting")]


def _over_network(ways: tuple[int, int], machine: MachineProfile, *, phase: str) -> list[Bound]:
    """Return the bound of simultaneous receiving and sending over a full-duplex network."""
    if not any(ways):
        return []
    rate = machine.links.network
    what = f"{format_bytes(ways[0])} from other nodes, {format_bytes(ways[1])} to them"
    return [Bound(phase, None if rate is None else max(ways) / rate.value, what, "network")]


def _between_gpus(size: int, machine: MachineProfile, *, phase: str, what: str) -> Bound:
    """Return the bound of `size` bytes over the links between GPUs, or through host memory if there are none."""
    rate = machine.links.between_gpus or machine.links.all_to_all or machine.rates.both_ways
    return Bound(phase, None if rate is None else size / rate.value, f"{format_bytes(size)} {what}", "gpus")


def zero_bounds(links: Sequence[Traffic], machine: MachineProfile) -> list[Bound]:
    """Return the bounds of ZeRO's collectives, which overlap matrix products; empty on a CPU, where none are known."""
    found = []
    for one in links if machine.gpu is not None else ():
        if one.place == NETWORK:
            found += _over_network((one.read, one.written), machine, phase=one.phase)
        else:
            found.append(_between_gpus(one.read, machine, phase=one.phase, what="gathered and scattered by each GPU"))
    return found


# -- the gradient norm of a weight, divided over the ranks that each hold a part of its summed gradient
#
# A norm is computed from pieces of fixed size, counted from the weight's start, so that its bits do not depend on the
# number of ranks. The ranks' ranges may cut a piece. A rank with a later part of a piece sends it to the rank in whose
# range the piece begins. The engine communicates by these rules.

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
    ends: int  # end of the weight
    has: int  # end of the weight's part in its range
    gives: Part | None  # the part that it sends to an earlier rank
    gets: tuple[Part, ...]  # the parts that it receives from later ranks


def norm_parts(unit: Unit, place: Place, *, width: int, rank: int, ranks: int) -> NormShards:
    """Return the share of `rank` in a weight's norm with pieces of `width` elements."""
    sent: list[tuple[int, Part]] = []  # parts of pieces that an earlier rank computes, and that rank
    for other in range(ranks):
        first, has = _within(unit, place, other, ranks=ranks)
        into = (first - place.start) % width  # elements since the start of the piece
        if into and first < has:
            owner = rank_of(unit, first - into, ranks=ranks)
            sent.append((owner, (other, first, min(has, first - into + width))))
    first, has = _within(unit, place, rank, ranks=ranks)
    starts = range(first + (place.start - first) % width, has, width)
    gives = next(((owner, begin, end) for owner, (giver, begin, end) in sent if giver == rank), None)
    gets = tuple(part for owner, part in sent if owner == rank)
    return NormShards(starts, place.start + place.weight.numel, has, gives, gets)


def _within(unit: Unit, place: Place, rank: int, *, ranks: int) -> tuple[int, int]:
    """Return the elements [first, end) of a weight in a rank's range; first equals end if there are none."""
    first, end = range_of_rank(unit, rank, ranks=ranks)
    first = max(first, place.start)
    return first, max(first, min(end, place.start + place.weight.numel))
