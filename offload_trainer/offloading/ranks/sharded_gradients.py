"""Gradients of several ranks: each rank adds up its stretches of what all of them have computed.

    autograd ──> outbox of the rank ──meet──> the owner of each stretch adds rank 0's, rank 1's, ... to the sums
                                    ──sent──> inbox of the owner, where that is on another node

A unit is exchanged once all of its gradients of a micro-batch are laid out, and all units before it in the backward's
order have been; what did not get a gradient is known at the end of the backward. Two outboxes take turns: whoever
meets for a unit has read the one before; what goes to other nodes has gone by then, while the backward went on.
Micro-batch a of rank r is number a * ranks + r of one rank, and sums are added in that order, so they have one rank's
bits; who had a gradient travels along, since adding a zero can change a bit and decides whether a weight is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload_trainer.offloading.device.base import Device
from offload_trainer.offloading.gradients.collector import Complete, Gradients, TiedGradients
from offload_trainer.offloading.gradients.host_accumulator import StagedSums
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.shared_norms import SharedNorms
from offload_trainer.plan.tiered.layout import Place, Unit, largest_stretch, stretch_of
from offload_trainer.plan.tiered.spec import GRADIENT_BUFFERS, OUTBOXES, exchange_bytes
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future


@dataclass(frozen=True)
class _UnderWay:
    """A unit of which everything is laid out, and is on its way from other nodes."""

    unit: Unit
    box: int
    arrived: Callable[[], None]  # waits for it


class SharedGradients:
    """Sums of one step over all ranks, in host memory; what `Gradients` is to one rank."""

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
        """Sums in `store`, whose homes are RAM and drives; `given`: the dtype of the gradients.

        `order`: the weights' names as the norm adds them up.
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
        inbox = largest_stretch(units, ranks=node.world)
        self._inboxes = {rank: host_buffer(inbox * given.itemsize).view(given) for rank in node.elsewhere}
        self._turns = [unit for unit in reversed(units) if unit.trained]  # as a backward computes them
        self._names = {unit.index: _trained(unit) for unit in units}
        most = max(len(names) for names in self._names.values())
        marks = node.memory_of_each(OUTBOXES * most)
        self._marks = {rank: mark.view(OUTBOXES, -1) for rank, mark in marks.items()}  # 1: the weight got a gradient
        self._told = {rank: torch.zeros(most, dtype=torch.uint8) for rank in node.elsewhere}  # the same, from there
        ordered = device.place.type != "cpu"
        placed = [self._place[name] for name in order if name in self._place]
        self._norms = SharedNorms(placed, node, dtype=self.dtype, ordered=ordered)
        self._uses = TiedGradients({name: place.weight.uses for name, (_, place) in self._place.items()})
        self._arrived: set[str] = set()  # in this step, on any rank
        self._waiting: dict[str, torch.Tensor] = {}  # of this micro-batch, until it is their unit's turn
        self._laid: set[str] = set()  # of the unit whose turn it is
        self._copies: list[Future] = []
        self._turn = self._round = 0
        self._under_way: _UnderWay | None = None
        self._last = False  # whether these are the step's last gradients
        self._taken: set[int] = set()  # units whose norms are those of their sums
        self._complete: Complete | None = None

    def watch(self, complete: Complete) -> None:
        """Tell of each unit, in the step's last backward, once all ranks' gradients are in this rank's sums, and home.

        Every rank is through with the unit's weights in this step then. On any thread. A unit of which one weight got
        no gradient in the step, on no rank, is not told of.
        """
        self._complete = complete

    # -- during backward ----------------------------------------------------------------------------------------------

    def add(self, name: str, gradient: torch.Tensor, *, last: bool) -> None:
        """Take a gradient of this micro-batch from one use of a weight. May wait for the other ranks."""
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
        """A micro-batch is through: what is left is exchanged, whatever has got no gradient."""
        self._last = last
        for name, flat in self._uses.rest():
            self._take(name, flat)
        while self._turn < len(self._turns):
            self._exchange()
        self._settle()
        assert not self._waiting, f"gradients of {list(self._waiting)} after their unit's turn"
        self._turn = 0

    def _lay_out(self, name: str, flat: torch.Tensor) -> None:
        """A gradient of the unit whose turn it is, where the others read it."""
        place = self._place[name][1]
        box = self._boxes[self._node.rank][self._round % OUTBOXES]
        self._copies.append(self._device.download(flat, box[place.start :][: flat.numel()]))
        self._laid.add(name)

    def _exchange(self) -> None:
        """The unit whose turn it is: from here on every rank's gradients are on their way to their owners."""
        unit, box = self._turns[self._turn], self._round % OUTBOXES
        names = self._names[unit.index]
        mark = self._marks[self._node.rank][box]
        for number, name in enumerate(names):
            mark[number] = name in self._laid
        for copy in self._copies:
            copy.wait()
        self._settle()  # whoever meets has read the unit before
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
        """Begin to send each owner on another node what is its, and to receive what is this rank's."""
        node, count = self._node, len(self._names[unit.index])
        out, into = [], []
        for rank in node.elsewhere:
            first, end = stretch_of(unit, rank, ranks=node.world)
            out += [(rank, self._marks[node.rank][box][:count]), (rank, self._boxes[node.rank][box][first:end])]
        first, end = stretch_of(unit, node.rank, ranks=node.world)
        for rank in node.elsewhere:
            into += [(rank, self._told[rank][:count]), (rank, self._inboxes[rank][: end - first])]
        return node.send_recv(out, into)

    def _settle(self) -> None:
        """The unit that is under way: every rank's gradients to the sums that are this rank's."""
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
        """Its sums go to their home, where they are not collected there."""
        made = self._device.mark()
        self._sums.send(unit.index).then(lambda error: complete(unit.index, made, error))

    def _add_up(self, unit: Unit, box: int, givers: Mapping[str, Sequence[int]]) -> None:
        """Add a unit's gradients to this rank's stretch of the sums: of each weight its givers', in their order."""
        if not any(givers.values()):
            return
        sums = self._sums.collecting(unit.index)
        first, end = stretch_of(unit, self._node.rank, ranks=self._node.world)
        for name, ranks in givers.items():
            place = self._place[name][1]
            here = slice(max(first, place.start), min(end, place.start + place.weight.numel))
            for rank in ranks:
                if here.start < here.stop:
                    target, values = sums[here], self._given(rank, box, here, first=first)
                    target.add_(values) if name in self._arrived else target.copy_(values)
                self._arrived.add(name)

    def _given(self, rank: int, box: int, here: slice, *, first: int) -> torch.Tensor:
        """A rank's gradients of elements in this rank's stretch, which begins at `first`."""
        if rank in self._boxes:
            return self._boxes[rank][box][here]
        return self._inboxes[rank][here.start - first : here.stop - first]

    # -- after it -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All ranks' sums are in their homes when this returns."""
        self._sums.send_all()
        self._node.barrier()

    def norm(self) -> float:
        """Global norm of the sums, as they are scaled: infinite or NaN if one of them is. After `finish`."""
        norms = self.norms()
        return float(torch.linalg.vector_norm(torch.stack(list(norms.values())))) if norms else 0.0

    def norms(self) -> dict[str, torch.Tensor]:
        """The norm of each weight's sum, in the model's order: fp32, 0-dim, on the CPU. After `finish`."""
        for unit in self._turns:
            sums = self.store.host(unit.index)
            if sums is not None and unit.index not in self._taken:  # no micro-batch was the last
                self._norms.take(unit.index, sums, self._arrived, leaves=False)
        return self._norms.of(self._arrived)

    def on_device(self, unit: int) -> torch.Tensor | None:
        """None: no sums live on a device."""
        return None

    def read(self, unit: int, start: int, buffer: torch.Tensor, *, after: Any) -> Future:
        """Fill `buffer` (host memory) with a unit's sums from element `start` on, from a drive."""
        return self.store.read(unit, start, buffer)

    def has(self, name: str) -> bool:
        """Whether the weight got a gradient in this step, on any rank."""
        return name in self._arrived

    @property
    def arrived(self) -> frozenset[str]:
        """Names of the weights that got a gradient in this step, on any rank."""
        return frozenset(self._arrived)

    def clear(self) -> None:
        """Begin the next step; what is in the sums is overwritten. All ranks have read them: they have met."""
        self._arrived.clear()
        self._taken.clear()
        self._sums.clear()
        self._norms.clear()

    def close(self) -> None:
        self._waiting.clear()


def _trained(unit: Unit) -> list[str]:
    return [place.weight.name for place in unit.places if place.weight.trainable]


AnyGradients = Gradients | SharedGradients
