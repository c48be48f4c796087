"""Gradients of several ranks on one node: each rank adds up its stretches of what all of them have computed.

    autograd ──> outbox of the rank ──meet──> the owner of each stretch adds rank 0's, rank 1's, ... to the sums

A unit is exchanged once all of its gradients of a micro-batch are laid out, and all units before it in the backward's
order have been; what did not get a gradient is known at the end of the backward. Two outboxes take turns: whoever
meets for a unit has read the one before. Micro-batch a of rank r is number a * ranks + r of one rank, and sums are
added in that order, so they have one rank's bits; who had a gradient travels along, since adding a zero can change a
bit and decides whether a weight is updated. Sums are in memory that all ranks see: each takes norms of some weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload_trainer.offloading.device import Device
from offload_trainer.offloading.gradients import Gradients, Uses
from offload_trainer.offloading.node import Node
from offload_trainer.offloading.norms import norm_of, ordered_norm
from offload_trainer.offloading.store import UnitStore
from offload_trainer.offloading.sums import Staged
from offload_trainer.plan.layout import Place, Unit, stretch_of
from offload_trainer.plan.sizes import GRADIENT_BUFFERS, OUTBOXES, exchange_bytes
from offload_trainer.storage.transfer import Future


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
        self._sums = Staged(units, store, stagings=GRADIENT_BUFFERS, node=node)
        size = exchange_bytes(units, item_bytes=given.itemsize)
        boxes = node.memory_of_each(size, pinned=device.is_cuda)
        self._boxes = [box.view(given).view(OUTBOXES, -1) for box in boxes]
        self._turns = [unit for unit in reversed(units) if unit.trained]  # as a backward computes them
        self._names = {unit.index: _trained(unit) for unit in units}
        marks = node.memory_of_each(OUTBOXES * max(len(names) for names in self._names.values()))
        self._marks = [mark.view(OUTBOXES, -1) for mark in marks]  # 1: this weight of the unit got a gradient
        self._order = tuple(name for name in order if name in self._place)
        self._norms = node.memory(4 * len(self._order)).view(torch.float32)
        self._takes = self._share_of_norms()
        self._taken: set[int] = set()  # norms that were taken on the way of their sums to a drive
        self._uses = Uses({name: place.weight.uses for name, (_, place) in self._place.items()})
        self._arrived: set[str] = set()  # in this step, on any rank
        self._waiting: dict[str, torch.Tensor] = {}  # of this micro-batch, until it is their unit's turn
        self._laid: set[str] = set()  # of the unit whose turn it is
        self._copies: list[Future] = []
        self._turn = self._round = 0
        self._last = False  # whether these are the step's last gradients

    def _share_of_norms(self) -> list[int]:
        """The places in `order` of the weights whose norms this rank takes: about as many elements as each other."""
        held = [0] * self._node.world
        mine = []
        for number in sorted(range(len(self._order)), key=lambda number: -self._numel(self._order[number])):
            rank = held.index(min(held))
            held[rank] += self._numel(self._order[number])
            if rank == self._node.rank:
                mine.append(number)
        return mine

    def _numel(self, name: str) -> int:
        return self._place[name][1].weight.numel

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
        assert not self._waiting, f"gradients of {list(self._waiting)} after their unit's turn"
        self._turn = 0

    def _lay_out(self, name: str, flat: torch.Tensor) -> None:
        """A gradient of the unit whose turn it is, where the others read it."""
        place = self._place[name][1]
        box = self._boxes[self._node.rank][self._round % OUTBOXES]
        self._copies.append(self._device.download(flat, box[place.start :][: flat.numel()]))
        self._laid.add(name)

    def _exchange(self) -> None:
        """The unit whose turn it is: every rank's gradients to the sums that are this rank's."""
        unit, box = self._turns[self._turn], self._round % OUTBOXES
        names = self._names[unit.index]
        mark = self._marks[self._node.rank][box]
        for number, name in enumerate(names):
            mark[number] = name in self._laid
        for copy in self._copies:
            copy.wait()
        self._sums.claim(unit.index)
        self._node.meet()
        told = [marks[box][: len(names)].tolist() for marks in self._marks]
        givers = [[rank for rank, its in enumerate(told) if its[number]] for number in range(len(names))]
        self._add_up(unit, box, dict(zip(names, givers, strict=True)))
        self._copies.clear()
        self._laid.clear()
        self._turn += 1
        self._round += 1
        if self._turn < len(self._turns):
            for name in self._names[self._turns[self._turn].index]:
                if name in self._waiting:
                    self._lay_out(name, self._waiting.pop(name))

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
                    target, values = sums[here], self._boxes[rank][box][here]
                    target.add_(values) if name in self._arrived else target.copy_(values)
                self._arrived.add(name)
        if self._last and self.store.host(unit.index) is None:
            self._take_norms(unit)

    def _take_norms(self, unit: Unit) -> None:
        """Norms of a unit whose sums leave for a drive, while they are in memory that all ranks see.

        Nobody writes there before all have met for the next unit.
        """
        self._node.meet()
        sums = self._sums.collecting(unit.index)
        for number in self._takes:
            its, place = self._place[self._order[number]]
            if its is unit and place.weight.name in self._arrived:
                self._norms[number] = self._norm_of(sums[place.start :][: place.weight.numel])
                self._taken.add(number)

    # -- after it -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All ranks' sums are in their homes when this returns."""
        self._sums.send_all()
        self._node.meet()

    def norm(self) -> float:
        """Global norm of the sums, as they are scaled: infinite or NaN if one of them is. After `finish`."""
        norms = self.norms()
        return float(torch.linalg.vector_norm(torch.stack(list(norms.values())))) if norms else 0.0

    def norms(self) -> dict[str, torch.Tensor]:
        """The norm of each weight's sum, in the model's order: fp32, 0-dim, on the CPU. After `finish`."""
        for number in self._takes:
            name = self._order[number]
            if name in self._arrived and number not in self._taken:
                self._norms[number] = self._norm_of(self._sum_of(name))
                self._taken.add(number)
        self._node.meet()
        return {name: self._norms[number] for number, name in enumerate(self._order) if name in self._arrived}

    def _sum_of(self, name: str) -> torch.Tensor:
        unit, place = self._place[name]
        sums = self.store.host(unit.index)
        if sums is None:
            return self.store.get(unit.index, place.start, place.weight.numel)
        return sums[place.start : place.start + place.weight.numel]

    def _norm_of(self, values: torch.Tensor) -> torch.Tensor:
        return norm_of(values) if self._device.place.type == "cpu" else ordered_norm(values)

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

    def close(self) -> None:
        self._waiting.clear()


def _trained(unit: Unit) -> list[str]:
    return [place.weight.name for place in unit.places if place.weight.trainable]


AnyGradients = Gradients | SharedGradients
