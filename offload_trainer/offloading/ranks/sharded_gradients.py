"""Reduce-scatter and accumulate the gradients of several ranks: each rank keeps the sums of its range of every unit.

A rank lays the gradients of a unit out in shared memory, and after a barrier each range's owner adds those of rank 0,
1, ... to its sums; to owners on other nodes they are sent. Units are exchanged in the backward's order, one with
missing gradients at the end. Ranks also exchange which weights have a gradient, because adding a zero could change a
bit. Micro-batch a of rank r counts as micro-batch a * ranks + r of a single rank, whose bits sums and norms have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.offloading.gradients.collector import Complete, GradientIntake, Gradients, StagedSums
from offload_trainer.optim.norms import Pieces
from offload_trainer.plan.communication import NormShards, norm_parts
from offload_trainer.plan.tiered.layout import Place, Unit, largest_range, range_of_rank
from offload_trainer.plan.tiered.spec import OUTBOXES, exchange_bytes
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future

if TYPE_CHECKING:
    from offload_trainer.offloading.allocation import EngineParts

_ONE_BACKWARD = "several ranks exchange gradients at the end of each session.micro_batch(...), around one backward"


class ShardedGradients:
    """The gradient sums of one step over all ranks, in host memory or on drives; replaces `Gradients`."""

    def __init__(
        self, parts: EngineParts, stages: Sequence[Sequence[Unit]], sums: StagedSums, *, order: Sequence[str]
    ) -> None:
        """Allocate the outboxes and inboxes. All ranks call it.

        `stages`: the units of which this rank gets gradients, in the backward's order; of a pipeline those of each
        block. `sums`: those of the ranks `parts.node.peers`, which get gradients of the same units.
        """
        units, given = [unit for stage in stages for unit in stage], parts.dtype
        self.store, self.dtype = sums.store, sums.store.dtype
        self.on_device: Mapping[int, torch.Tensor] = {}  # none of these sums
        self._all_ranks, self._order, node = parts.node, order, parts.node.peers
        self._device, self._node, self._kernel = parts.device, node, parts.kernels[0]
        self._intake = GradientIntake(units)
        self.arrived: Set[str] = self._intake.arrived  # weights that have a gradient in this step on any rank
        self._complete: Complete | None = None
        self._sums = sums
        boxes = node.memory_of_each(exchange_bytes(units, item_bytes=given.itemsize), pinned=parts.device.is_cuda)
        self._outboxes = {rank: box.view(given).view(OUTBOXES, -1) for rank, box in boxes.items()}
        inbox = largest_range(units, ranks=node.world) * given.itemsize
        self._inboxes = {rank: host_buffer(inbox).view(given) for rank in node.remote_ranks}
        self._stages = [[unit for unit in stage if unit.trained] for stage in stages]
        self._turns = self._stages[0]  # the backward completes units in this order
        self._names = self._intake.names
        most = max(len(names) for names in self._names.values())
        marks = node.memory_of_each(OUTBOXES * most)
        self._marks = {rank: mark.view(OUTBOXES, -1) for rank, mark in marks.items()}  # 1: the weight has a gradient
        # Ranks of other nodes send their marks over the network.
        self._remote_marks = {rank: torch.zeros(most, dtype=torch.uint8) for rank in node.remote_ranks}
        placed = [self._intake.place[name] for name in order if name in self._intake.place]
        self._norms = ShardedNorms(parts, placed)
        self._waiting: dict[str, torch.Tensor] = {}  # gradients of this micro-batch whose unit's turn has not come
        self._in_outbox: set[str] = set()  # weights of the current unit whose gradient is in the outbox
        self._copies: list[Future] = []
        self._turn = self._round = self._stage = 0
        # The unit whose exchange has begun, its outbox, the wait for transfers between nodes, and `_last`.
        self._exchange_begun: tuple[Unit, int, Callable[[], None], bool] | None = None
        self._last = False  # the current micro-batch is the step's last
        self._normed: set[int] = set()  # units whose partial norms are up to date

    def report_to(self, complete: Complete | None, *, owners: Mapping[int, int]) -> None:
        """Begin a step's last backward as `Gradients.report_to` does; there are no early updates with `owners`."""
        self._complete = complete

    def turn_to(self, micro_batch: int) -> None:
        """Announce the micro-batch of a pipeline whose gradients arrive next; number 0 begins the rank's next block."""
        if self._stage:
            self._exchange_rest()
        if micro_batch == 0:
            self._turns = self._stages[self._stage]
            self._stage += 1
        self._turn, self._intake.micro_batch = 0, micro_batch

    def add(self, name: str, gradient: torch.Tensor, *, last: bool) -> None:
        """Add a gradient of this micro-batch from one use of a weight. This may wait for the other ranks."""
        self._last = last
        if name not in self._intake.place:
            raise TrainerError(f"several ranks have gradients of {name}: leave parallel.pipeline out")
        if (flat := self._intake.add(name, gradient)) is not None:
            self._collect(name, flat)

    def _collect(self, name: str, flat: torch.Tensor) -> None:
        if name in self._waiting or name in self._in_outbox:
            raise UserError(f"{name} got a second gradient in a micro-batch: {_ONE_BACKWARD}")
        if self._turn == len(self._turns) or self._intake.place[name][0] is not self._turns[self._turn]:
            self._waiting[name] = flat
            return
        self._lay_out(name, flat)
        while self._turn < len(self._turns) and len(self._in_outbox) == len(self._names[self._turns[self._turn].index]):
            self._exchange()

    def end_of_backward(self, *, last: bool) -> None:
        """End a micro-batch: exchange the remaining units, also those with missing gradients."""
        self._last = last
        for name, flat in self._intake.rest():
            self._collect(name, flat)
        self._exchange_rest()
        self._finish_exchange()
        if self._waiting:
            raise UserError(f"{next(iter(self._waiting))} got a second gradient in a micro-batch: {_ONE_BACKWARD}")
        self._turn = self._stage = 0

    def _exchange_rest(self) -> None:
        while self._turn < len(self._turns):
            self._exchange()

    def _lay_out(self, name: str, flat: torch.Tensor) -> None:
        """Start copying a gradient of the current unit to this rank's outbox."""
        place = self._intake.place[name][1]
        box = self._outboxes[self._node.rank][self._round % OUTBOXES]
        self._copies.append(self._device.download([(flat, box[place.start :][: flat.numel()])]))
        self._in_outbox.add(name)

    def _exchange(self) -> None:
        """Begin to exchange the current unit's gradients, and go to the next unit."""
        unit, box = self._turns[self._turn], self._round % OUTBOXES
        mark = self._marks[self._node.rank][box]
        for number, name in enumerate(self._names[unit.index]):
            mark[number] = name in self._in_outbox
        for copy in self._copies:
            copy.wait()
        self._finish_exchange()  # after the barrier other ranks may overwrite the previous unit's outbox
        self._sums.claim(unit.index)
        self._node.barrier()
        self._exchange_begun = unit, box, self._sent_and_received(unit, box), self._last
        self._copies.clear()
        self._in_outbox.clear()
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
        own_first, own_end = range_of_rank(unit, node.rank, ranks=node.world)
        for rank in node.remote_ranks:
            first, end = range_of_rank(unit, rank, ranks=node.world)
            out += [(rank, self._marks[node.rank][box][:count]), (rank, self._outboxes[node.rank][box][first:end])]
            into += [(rank, self._remote_marks[rank][:count]), (rank, self._inboxes[rank][: own_end - own_first])]
        return node.send_recv(out, into)

    def _finish_exchange(self) -> None:
        if self._exchange_begun is None:
            return
        (unit, box, wait_for_transfers, last), arrived = self._exchange_begun, self._intake.arrived
        wait_for_transfers()
        self._exchange_begun = None
        self._add_up(unit, box)
        self._normed.discard(unit.index)
        if last and (names := [name for name in self._names[unit.index] if name in arrived]):
            staged = self.store.host(unit.index) is None
            self._norms.take(names, self._sums.collecting(unit.index), staged=staged)
            self._normed.add(unit.index)
            if self._complete is not None and names == self._names[unit.index]:
                report = partial(self._complete, unit.index, self._device.mark())
                self._sums.send(unit.index).then(report)

    def _add_up(self, unit: Unit, box: int) -> None:
        """Add the gradients of rank 0, 1, ... to this rank's range of a unit's sums."""
        arrived, (first, end) = self._intake.arrived, range_of_rank(unit, self._node.rank, ranks=self._node.world)
        boxes = {rank: outbox[box][first:end] for rank, outbox in self._outboxes.items()} | self._inboxes
        marks = {rank: marks[box] for rank, marks in self._marks.items()} | self._remote_marks
        names = self._names[unit.index]
        marked = [marks[rank][: len(names)].tolist() for rank in range(self._node.world)]
        if not any(map(any, marked)):
            return
        sums = self._sums.collecting(unit.index)
        for number, name in enumerate(names):
            place = self._intake.place[name][1]
            start, stop = max(first, place.start), min(end, place.start + place.weight.numel)
            for rank in (rank for rank, has in enumerate(marked) if has[number]):
                if start < stop:
                    values = boxes[rank][start - first : stop - first]
                    self._kernel.add(sums[start:stop], values, first=name not in arrived)
                arrived.add(name)

    def finish(self) -> None:
        """Wait until all ranks have stored their sums. Raises UserError if a backward was not ended."""
        if self._turn or self._exchange_begun or self._in_outbox or self._waiting:
            raise UserError(f"a backward was outside session.micro_batch(...), or stopped in it: {_ONE_BACKWARD}")
        self._sums.send_all()
        self._node.barrier()

    def norms(self) -> dict[str, torch.Tensor]:
        """Return the norm of each weight's sum in the model's order (fp32, 0-dim, on the CPU). Call `finish` before."""
        for unit in itertools.chain(*self._stages):
            sums = self.store.host(unit.index)
            if sums is not None and unit.index not in self._normed:  # the last micro-batch was not announced
                self._norms.take(self.arrived & {*self._names[unit.index]}, sums, staged=False)
        norms = self._norms.of(self.arrived)
        if self._node is self._all_ranks:
            return norms
        mine = {} if self._node.rank else norms  # each pipeline has the same
        return self._intake.norms_of_all(mine, order=self._order, node=self._all_ranks)

    def read(self, unit: int, start: int, buffer: torch.Tensor, *, after: Any) -> Future:
        return self.store.read(unit, start, buffer)

    def clear(self) -> None:
        """Begin the next step, whose gradients overwrite the sums. All ranks must have passed a barrier after use."""
        self._intake.clear()
        self._normed.clear()
        self._sums.clear()
        self._norms.clear()

    def close(self) -> None:
        """Drop gradients that wait for their unit's turn."""
        self._waiting.clear()


GradientSums = Gradients | ShardedGradients  # the gradient sums that an update reads: those of one rank, or of several


@dataclass(frozen=True)
class _Share:
    """One rank's share in the norm of one weight."""

    pieces: Pieces
    numbers: slice  # the weight's positions among all partial norms
    first: int  # the first position that this rank computes
    parts: NormShards


class ShardedNorms:
    """The norms of the weights in `places`, in the order in which they are summed."""

    def __init__(self, parts: EngineParts, places: Sequence[tuple[Unit, Place]]) -> None:
        """Prepare this rank's shares."""
        self._dtype, self._kernel = parts.gradient_dtype, parts.kernels[0]
        self._node = node = parts.node.peers
        self._shares: dict[str, _Share] = {}
        count = 0
        for unit, place in places:
            pieces = Pieces.of(place.weight.numel, ordered=parts.device.torch_device.type != "cpu")
            end = count + -(-place.weight.numel // pieces.width)
            shards = norm_parts(unit, place, width=pieces.width, rank=node.rank, ranks=node.world)
            first = count + (shards.starts.start - place.start) // pieces.width
            self._shares[place.weight.name] = _Share(pieces, slice(count, end), first, shards)
            count = end
        self._numbers = torch.zeros(count)  # partial norms of this rank; 0 at other ranks' positions
        self._cut: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # parts of pieces: to send, and to be completed

    def take(self, names: Iterable[str], sums: torch.Tensor, *, staged: bool) -> None:
        """Compute this rank's partial norms of these weights; of the unit's `sums` only this rank's range is valid.

        `staged`: their memory will be reused soon.
        """
        for name in names:
            share = self._shares[name]
            parts = share.parts
            starts = parts.starts[:-1] if parts.gets else parts.starts
            if starts:
                whole = sums[starts[0] : min(starts[-1] + starts.step, parts.has)]
                results = self._kernel.add(whole, None, pieces=share.pieces)
                self._numbers[share.first : share.first + len(starts)] = results
            given = sums[parts.gives[1] : parts.gives[2]] if parts.gives else sums[:0]
            begun = sums[parts.starts[-1] : parts.has] if parts.gets else sums[:0]
            self._cut[name] = (given.clone(), begun.clone()) if staged else (given, begun)

    def of(self, arrived: Container[str]) -> dict[str, torch.Tensor]:
        """Return the norms (fp32, 0-dim) of the weights that have arrived, equal on all ranks, which call it."""
        shares = {name: share for name, share in self._shares.items() if name in arrived}
        gets = {
            name: [(rank, torch.empty(end - first, dtype=self._dtype)) for rank, first, end in share.parts.gets]
            for name, share in shares.items()
        }
        out = [(share.parts.gives[0], self._cut[name][0]) for name, share in shares.items() if share.parts.gives]
        self._node.send_recv(out, [*itertools.chain(*gets.values())])()
        numbers = self._numbers.clone()
        for name, share in shares.items():
            if gets[name]:
                piece = torch.cat([self._cut[name][1], *(end for _, end in gets[name])])
                last = share.first + len(share.parts.starts) - 1
                numbers[last : last + 1] = self._kernel.add(piece, None, pieces=share.pieces)
        self._node.all_reduce(numbers)
        return {name: share.pieces.norm(numbers[share.numbers]) for name, share in shares.items()}

    def clear(self) -> None:
        """Begin the next step."""
        self._numbers.zero_()
        self._cut.clear()
