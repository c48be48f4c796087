"""Reduce-scatter and accumulate the gradients of several ranks: each rank keeps the sums of its shard of every unit.

    autograd ──> this rank's outbox ──barrier──> each shard's owner adds the gradients of rank 0, 1, ... to its sums
                                    ──sent─────> inbox of owners on other nodes

A unit is exchanged when the outbox has all its gradients of a micro-batch and all earlier units in the backward's order
have been exchanged. Units with missing gradients are exchanged at the end of the backward. Two outboxes alternate. A
rank reaches a unit's barrier only after it has added the previous unit's gradients, so that outbox may be overwritten.
Transfers to other nodes overlap with the backward.

Micro-batch a of rank r counts as micro-batch a * ranks + r of a single rank. Gradients are added in that order, so the
sums have a single rank's bits. Ranks also exchange which weights have a gradient, because adding a zero could change a
bit and would make the weight be updated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload_trainer.offloading.device import Device
from offload_trainer.offloading.gradients.collector import Complete, Gradients, TiedGradients
from offload_trainer.offloading.gradients.host_accumulator import StagedSums
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.shared_norms import SharedNorms
from offload_trainer.plan.tiered.layout import Place, Unit, largest_range, range_of_rank
from offload_trainer.plan.tiered.spec import GRADIENT_BUFFERS, OUTBOXES, exchange_bytes
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future


@dataclass(frozen=True)
class _UnderWay:
    """A unit whose exchange has begun: outboxes are complete, and transfers between nodes are in flight."""

    unit: Unit
    box: int
    arrived: Callable[[], None]  # waits for the transfers


class SharedGradients:
    """The gradient sums of one step over all ranks, in host memory or on drives; replaces `Gradients`."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: UnitStore,
        *,
        given: torch.dtype,
        device: Device,
        order: Sequence[str],
        node: Node,
    ) -> None:
        """Allocate the outboxes and inboxes. All ranks call it.

        Args:
            units: the model's units.
            store: the sums, in RAM and on drives.
            given: dtype of the gradients.
            device: the device that computes the gradients.
            order: weight names in the order in which their norms are summed.
            node: this rank's connections to the others.
        """
        self.store, self.dtype = store, store.dtype
        self._device, self._node = device, node
        self._place: dict[str, tuple[Unit, Place]] = {
            place.weight.name: (unit, place) for unit in units for place in unit.places if place.weight.trainable
        }
        self._sums = StagedSums(units, store, stagings=GRADIENT_BUFFERS, node=node)
        size = exchange_bytes(units, item_bytes=given.itemsize)
        boxes = node.memory_of_each(size, pinned=device.is_cuda)
        self._boxes = {rank: box.view(given).view(OUTBOXES, -1) for rank, box in boxes.items()}
        inbox = largest_range(units, ranks=node.world)
        self._inboxes = {rank: host_buffer(inbox * given.itemsize).view(given) for rank in node.elsewhere}
        self._turns = [unit for unit in reversed(units) if unit.trained]  # in the order of the backward
        self._names = {unit.index: _trained(unit) for unit in units}
        most = max(len(names) for names in self._names.values())
        marks = node.memory_of_each(OUTBOXES * most)
        self._marks = {rank: mark.view(OUTBOXES, -1) for rank, mark in marks.items()}  # 1: the weight has a gradient
        self._told = {
            rank: torch.zeros(most, dtype=torch.uint8) for rank in node.elsewhere
        }  # what ranks of other nodes sent
        ordered = device.place.type != "cpu"
        placed = [self._place[name] for name in order if name in self._place]
        self._norms = SharedNorms(placed, node, dtype=self.dtype, ordered=ordered)
        self._uses = TiedGradients({name: place.weight.uses for name, (_, place) in self._place.items()})
        self._arrived: set[str] = set()  # weights with a gradient in this step, on any rank
        self._waiting: dict[str, torch.Tensor] = {}  # gradients of this micro-batch whose unit's turn has not come
        self._laid: set[str] = set()  # weights of the current unit whose gradient is in the outbox
        self._copies: list[Future] = []
        self._turn = self._round = 0
        self._under_way: _UnderWay | None = None
        self._last = False  # the current micro-batch is the step's last
        self._taken: set[int] = set()  # units whose partial norms are up to date
        self._complete: Complete | None = None

    def watch(self, complete: Complete) -> None:
        """Call `complete` for each unit in the step's last backward, when this rank's sums of it are stored.

        By then no rank uses the unit's weights in this step any more. The call comes from any thread. A unit with a
        weight that has no gradient in this step on any rank is not reported.
        """
        self._complete = complete

    # -- during backward ----------------------------------------------------------------------------------------------

    def add(self, name: str, gradient: torch.Tensor, *, last: bool) -> None:
        """Add a gradient of this micro-batch from one use of a weight. This may wait for the other ranks."""
        self._last = last
        flat = self._uses.add(name, gradient.detach().reshape(-1))
        if flat is not None:
            self._take(name, flat)

    def _take(self, name: str, flat: torch.Tensor) -> None:
        assert name not in self._waiting, name
        assert name not in self._laid, name
        unit = self._place[name][0]
        if self._turn == len(self._turns) or unit is not self._turns[self._turn]:
            self._waiting[name] = flat
            return
        self._lay_out(name, flat)
        while self._turn < len(self._turns) and len(self._laid) == len(self._names[self._turns[self._turn].index]):
            self._exchange()

    def end_of_backward(self, *, last: bool) -> None:
        """End a micro-batch: exchange the remaining units, also those with missing gradients."""
        self._last = last
        for name, flat in self._uses.rest():
            self._take(name, flat)
        while self._turn < len(self._turns):
            self._exchange()
        self._settle()
        assert not self._waiting, f"gradients of {list(self._waiting)} after their unit's turn"
        self._turn = 0

    def _lay_out(self, name: str, flat: torch.Tensor) -> None:
        """Start copying a gradient of the current unit to this rank's outbox."""
        place = self._place[name][1]
        box = self._boxes[self._node.rank][self._round % OUTBOXES]
        self._copies.append(self._device.download(flat, box[place.start :][: flat.numel()]))
        self._laid.add(name)

    def _exchange(self) -> None:
        """Exchange the current unit's gradients: synchronise all ranks, start transfers, and go to the next unit."""
        unit, box = self._turns[self._turn], self._round % OUTBOXES
        names = self._names[unit.index]
        mark = self._marks[self._node.rank][box]
        for number, name in enumerate(names):
            mark[number] = name in self._laid
        for copy in self._copies:
            copy.wait()
        self._settle()  # after the barrier other ranks may overwrite the previous unit's outbox
        self._sums.claim(unit.index)
        self._node.barrier()
        self._under_way = _UnderWay(unit, box, self._sent_and_received(unit, box))
        self._copies.clear()
        self._laid.clear()
        self._turn += 1
        self._round += 1
        if self._turn < len(self._turns):
            for name in self._names[self._turns[self._turn].index]:
                if name in self._waiting:
                    self._lay_out(name, self._waiting.pop(name))

    def _sent_and_received(self, unit: Unit, box: int) -> Callable[[], None]:
        """Start sending gradients and marks to owners on other nodes, and receiving this rank's; return the wait."""
        node, count = self._node, len(self._names[unit.index])
        out, into = [], []
        for rank in node.elsewhere:
            first, end = range_of_rank(unit, rank, ranks=node.world)
            out += [(rank, self._marks[node.rank][box][:count]), (rank, self._boxes[node.rank][box][first:end])]
        first, end = range_of_rank(unit, node.rank, ranks=node.world)
        for rank in node.elsewhere:
            into += [(rank, self._told[rank][:count]), (rank, self._inboxes[rank][: end - first])]
        return node.send_recv(out, into)

    def _settle(self) -> None:
        """Finish the exchange that has begun, if any: add all ranks' gradients to this rank's sums."""
        if self._under_way is None:
            return
        (unit, box), node = (self._under_way.unit, self._under_way.box), self._node
        self._under_way.arrived()
        self._under_way = None
        marks = {rank: marks[box] for rank, marks in self._marks.items()} | self._told
        told = [marks[rank].tolist() for rank in range(node.world)]
        givers = [
            [rank for rank, its in enumerate(told) if its[number]] for number in range(len(self._names[unit.index]))
        ]
        self._add_up(unit, box, dict(zip(self._names[unit.index], givers, strict=True)))
        self._taken.discard(unit.index)
        if self._last and not self._arrived.isdisjoint(self._names[unit.index]):
            leaves = self.store.host(unit.index) is None
            self._norms.take(unit.index, self._sums.collecting(unit.index), self._arrived, leaves=leaves)
            self._taken.add(unit.index)
            if self._complete is not None and self._arrived.issuperset(self._names[unit.index]):
                self._tell(unit, self._complete)

    def _tell(self, unit: Unit, complete: Complete) -> None:
        """Store the unit's sums if they are in a staging buffer, and then report the unit."""
        made = self._device.mark()
        self._sums.send(unit.index).then(lambda error: complete(unit.index, made, error))

    def _add_up(self, unit: Unit, box: int, givers: Mapping[str, Sequence[int]]) -> None:
        """Add a unit's gradients to this rank's shard of the sums.

        `givers` lists, for each weight, the ranks that have a gradient of it, in the order of addition.
        """
        if not any(givers.values()):
            return
        sums = self._sums.collecting(unit.index)
        first, end = range_of_rank(unit, self._node.rank, ranks=self._node.world)
        for name, ranks in givers.items():
            place = self._place[name][1]
            here = slice(max(first, place.start), min(end, place.start + place.weight.numel))
            for rank in ranks:
                if here.start < here.stop:
                    target, values = sums[here], self._given(rank, box, here, first=first)
                    target.add_(values) if name in self._arrived else target.copy_(values)
                self._arrived.add(name)

    def _given(self, rank: int, box: int, here: slice, *, first: int) -> torch.Tensor:
        """Return another rank's gradients for elements `here` of this rank's shard, which begins at `first`."""
        if rank in self._boxes:
            return self._boxes[rank][box][here]
        return self._inboxes[rank][here.start - first : here.stop - first]

    # -- after it -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all ranks have stored their sums."""
        self._sums.send_all()
        self._node.barrier()

    def norm(self) -> float:
        """Return the global norm of the sums, unscaled; infinite or NaN if any element is. Call `finish` before."""
        norms = self.norms()
        return float(torch.linalg.vector_norm(torch.stack(list(norms.values())))) if norms else 0.0

    def norms(self) -> dict[str, torch.Tensor]:
        """Return the norm of each weight's sum in the model's order (fp32, 0-dim, on the CPU). Call `finish` before."""
        for unit in self._turns:
            sums = self.store.host(unit.index)
            if sums is not None and unit.index not in self._taken:  # the last micro-batch was not announced
                self._norms.take(unit.index, sums, self._arrived, leaves=False)
        return self._norms.of(self._arrived)

    def on_device(self, unit: int) -> torch.Tensor | None:
        """Return None, because these sums are never on the device."""
        return None

    def read(self, unit: int, start: int, buffer: torch.Tensor, *, after: Any) -> Future:
        """Fill `buffer` (host memory) with a unit's sums from element `start` on, from a drive."""
        return self.store.read(unit, start, buffer)

    def has(self, name: str) -> bool:
        """Return whether the weight has a gradient in this step on any rank."""
        return name in self._arrived

    @property
    def arrived(self) -> frozenset[str]:
        """Return the names of the weights that have a gradient in this step on any rank."""
        return frozenset(self._arrived)

    def clear(self) -> None:
        """Begin the next step, whose gradients overwrite the sums. All ranks must have passed a barrier after use."""
        self._arrived.clear()
        self._taken.clear()
        self._sums.clear()
        self._norms.clear()

    def close(self) -> None:
        """Drop gradients that wait for their unit's turn."""
        self._waiting.clear()


def _trained(unit: Unit) -> list[str]:
    return [place.weight.name for place in unit.places if place.weight.trainable]


AnyGradients = Gradients | SharedGradients
