"""What ranks move for each other in a step: bytes of one node on every link, and their seconds. Pure arithmetic.

The tiered engine (`offloading/ranks/sharded_gradients.py`, `node_comm.py`): N ranks, n of them on each of K nodes, a
micro-batches each, weights of e bytes, sums of g. Of a unit T elements are trained, of which S are updated on this node
and R by a rank:

    outboxes    a n e T written, a n e S read    each rank lays its gradients out, each owner reads its stretch of all
    sums        g S (2 a N - 1)                  in RAM: written once, then read and written for each that is added
    network     a (N - n) e S in                 of the gradients of all other nodes' ranks; a n e (T - S) out
                a n (N - n) w each way           whether each of w weights has got one, from each rank to each
                e (T - S) in, e (K - 1) S out    new weights, which are whole on each node
    norms       g (parts of pieces) each way     what a stretch's border cuts off a piece of a weight's norm
                                                 (`norm_shards.py`): among a node's ranks, and over the network
    gpus        e (T - R) into each GPU          new weights where they live on the device
                (n - 1) / n of a fetch           of weights in RAM that come by parts (`weight_transfer.py`), each time
    meets       a U + D + 5                      for each of U units, D of them with sums on drives, whose norms are
                                                 taken on the way; for targets and losses, at the sums, the norm, the
                                                 step
    agreements  U                                that a unit is home on all ranks, beside the update

Numbers, one for each piece of a norm and what is told at the begin of a step, are little, and not counted. The order of
additions is one rank's, so nothing is added up before it is sent: n times what a reduction would move.

Stock ZeRO's bytes are in `modes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.tiered.layout import DEVICE, TierMap, Unit, stretch_of
from offload_trainer.plan.tiered.norm_shards import given
from offload_trainer.plan.tiered.weight_transfer import TransferBytes
from offload_trainer.plan.time.step_time import Bound
from offload_trainer.plan.time.traffic import Traffic
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes

MEETS = 5  # of a step, beside those of units
OUTBOX, NETWORK, GPUS, NORMS = "outboxes", "network", "gpus", "norms"


@dataclass(frozen=True)
class CommCost:
    """Of a step, on one node: `links` by phase, `sums` bytes of memory traffic in the backward, meets, agreements."""

    links: tuple[Traffic, ...]
    sums: int
    meets: int
    agreements: int

    def bytes(self, place: str, phase: str) -> tuple[int, int]:
        """(read, written): of the network and the GPUs what comes in, and what goes out."""
        found = [one for one in self.links if (one.place, one.phase) == (place, phase)]
        return sum(one.read for one in found), sum(one.written for one in found)


def exchange_of(
    work: Workload,
    units: Sequence[Unit],
    homes: TierMap,
    *,
    ordered: bool,
    by_parts: Mapping[str, TransferBytes] | None = None,
    node: int = 0,
) -> CommCost:
    """What the ranks of a node move in a step, each weight having got its gradients; nothing where a rank is alone.

    `ordered`: whether norms are taken as for a GPU; `by_parts`: weights that come so to each device, by phase.
    """
    if work.world == 1:
        return CommCost((), sums=0, meets=0, agreements=0)
    e, micro, here, away = work.item_bytes, work.accumulate, work.here, work.world - work.here
    every = own = whole = held = on_gpus = weights = 0
    for unit in units:
        first, _ = stretch_of(unit, node * here, ranks=work.world)
        _, end = stretch_of(unit, node * here + here - 1, ranks=work.world)
        for place in unit.places:
            if place.weight.trainable:
                weights += 1
                every += place.weight.numel
                own += max(0, min(end, place.start + place.weight.numel) - max(first, place.start))
        whole += unit.trained
        held += end - first
        if homes.weights[unit.index] == DEVICE:
            mine = stretch_of(unit, node * here, ranks=work.world)
            on_gpus += unit.trained - (mine[1] - mine[0])
    links = [
        Traffic(OUTBOX, "backward", read=micro * here * e * own, written=micro * here * e * every),
        Traffic(GPUS, "update", read=e * on_gpus, written=0),
        *(Traffic(GPUS, phase, size.from_others, size.from_others) for phase, size in (by_parts or {}).items()),
    ]
    links += _norms(work, units, range(node * here, (node + 1) * here), ordered=ordered)
    if away:
        marks = micro * here * away * weights
        given, taken = micro * here * e * (whole - held), micro * away * e * held
        links.append(Traffic(NETWORK, "backward", read=taken + marks, written=given + marks))
        links.append(Traffic(NETWORK, "update", read=e * (whole - held), written=e * (work.nodes - 1) * held))
    sums = work.gradient_bytes * own * (2 * work.added - 1)
    turns = [unit for unit in units if unit.trained]
    meets = micro * len(turns) + sum(homes.gradients[unit.index] >= 0 for unit in turns) + MEETS
    moving = tuple(one for one in links if one.read or one.written)
    return CommCost(moving, sums=sums, meets=meets, agreements=len(turns))


def _norms(work: Workload, units: Sequence[Unit], mine: range, *, ordered: bool) -> list[Traffic]:
    """Parts of pieces of norms that the ranks of a node get and give: among themselves, and over the network."""
    among, got, sent = 0, 0, 0
    for giver, taker, elements in given(units, ranks=work.world, ordered=ordered):
        size = work.gradient_bytes * elements
        among += size if giver in mine and taker in mine else 0
        got += size if giver not in mine and taker in mine else 0
        sent += size if giver in mine and taker not in mine else 0
    return [Traffic(NORMS, "update", among, among), Traffic(NETWORK, "norm", got, sent)]


def waits(moved: CommCost, work: Workload, machine: MachineProfile) -> list[Bound]:
    """What backward and update wait for on top of all else, one after the other.

    autograd's thread waits for a unit's gradients, for the other ranks and for the additions before it goes on. What
    the network brings of gradients has until the next unit's are there, and new weights until the last are computed
    (`hidden_waits`).
    """
    if work.world == 1:
        return []
    bounds, meets = [_adding(moved, machine)], {"backward": moved.meets - MEETS, "update": MEETS}
    bounds += _over_network(moved.bytes(NETWORK, "norm"), machine, phase="update")
    return bounds + [bound for phase, count in meets.items() for bound in _meetings(count, work, machine, phase=phase)]


def hidden_waits(moved: CommCost, work: Workload, machine: MachineProfile) -> list[Bound]:
    """What goes on beside a phase's own work: gradients on the network; new weights, as each unit has its own."""
    bounds = [*_over_network(moved.bytes(NETWORK, "backward"), machine, phase="backward")]
    bounds += _over_network(moved.bytes(NETWORK, "update"), machine, phase="update")
    to_gpus, _ = moved.bytes(GPUS, "update")
    if machine.gpu is not None and to_gpus:
        bounds.append(_between_gpus(to_gpus, machine, phase="update", what="of updated weights to each GPU"))
    return bounds + _meetings(moved.agreements, work, machine, phase="update", ways=1)


def _meetings(count: int, work: Workload, machine: MachineProfile, *, phase: str, ways: int = 2) -> list[Bound]:
    """Nothing where nobody knows what a message takes.

    Rank 0 hears of all others in turn and answers them in turn; a gather goes round once.
    """
    message = machine.links.message
    if message is None or count == 0:
        return []
    return [Bound(phase, count * ways * (work.world - 1) * message.seconds, f"{count} barriers", "meeting")]


def _adding(moved: CommCost, machine: MachineProfile) -> Bound:
    """Gradients of all ranks into the sums: from outboxes, and from what came of other nodes, which was written too."""
    size = moved.sums + moved.bytes(OUTBOX, "backward")[0] + 2 * moved.bytes(NETWORK, "backward")[0]
    rate = machine.rates.memory
    what = f"{format_bytes(size)} in RAM to add the ranks' gradients"
    return Bound("backward", None if rate is None else size / rate.value, what, "memory")


def _over_network(ways: tuple[int, int], machine: MachineProfile, *, phase: str) -> list[Bound]:
    """Both ways at once, as networks are."""
    if not any(ways):
        return []
    rate = machine.links.network
    what = f"{format_bytes(ways[0])} from other nodes, {format_bytes(ways[1])} to them"
    return [Bound(phase, None if rate is None else max(ways) / rate.value, what, "network")]


def _between_gpus(size: int, machine: MachineProfile, *, phase: str, what: str) -> Bound:
    """By their own links, or, where they have none, through host memory."""
    rate = machine.links.between_gpus or machine.links.all_to_all or machine.rates.both_ways
    return Bound(phase, None if rate is None else size / rate.value, f"{format_bytes(size)} {what}", "gpus")


def zero_bounds(links: Sequence[Traffic], machine: MachineProfile) -> list[Bound]:
    """What they take, beside the products that they are overlapped with. On a CPU nothing is claimed of them."""
    found = []
    for one in links if machine.gpu is not None else ():
        if one.place == NETWORK:
            found += _over_network((one.read, one.written), machine, phase=one.phase)
        else:
            found.append(_between_gpus(one.read, machine, phase=one.phase, what="gathered and scattered by each GPU"))
    return found
