"""The run's 16-bit weights, by unit: on the device, in host memory, or on drives.

What the update rounds out of the masters goes through here (`direct`, or `commit` of a buffer), and what the model
computes with comes from here (`resident`, or a `Stream` that fetches).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload_trainer.offloading.device.base import Device, Read
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.fetch_matching import SideGroup
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.shared_reads import SharedReads
from offload_trainer.offloading.ranks.weight_all_gather import WeightAllGather
from offload_trainer.plan.tiered.layout import DEVICE, RAM, Place, Unit, begin_in, stretch_of
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Future, Transfers


class PlacedWeights:
    """One flat tensor in `dtype` for each unit."""

    def __init__(
        self,
        units: Sequence[Unit],
        homes: Sequence[int],
        *,
        dtype: torch.dtype,
        device: Device,
        files: Sequence[DriveFile],
        transfers: Transfers,
        node: Node,
    ) -> None:
        """Of those on the device each rank has its own, which `broadcast` brings up to date; others are once a node."""
        self._node = node
        self.homes, self.dtype, self.units = tuple(homes), dtype, tuple(units)
        self._device = device
        away = [0 if home == DEVICE else unit.elements for unit, home in zip(units, homes, strict=True)]
        places = [RAM if home == DEVICE else home for home in homes]
        pinned = device.is_cuda
        self.store = UnitStore(away, places, dtype=dtype, files=files, transfers=transfers, pinned=pinned, node=node)
        self._reads: SharedReads | None = None
        if node.world > 1 and any(home >= 0 for home in places):
            self._reads = SharedReads(units, self.store, node=node, rounds=node.rounds(), barrier=SideGroup().barrier)
        self._gathers: WeightAllGather | None = None
        if node.by_parts and any(away):
            self._gathers = WeightAllGather(node, rounds=node.rounds(), join=node.joining(gpus=device.is_cuda))
        self._starts: dict[int, int] = {}
        end = 0
        for unit, home in zip(units, homes, strict=True):
            if home == DEVICE:
                self._starts[unit.index] = end
                end += unit.elements
        if device.is_cuda:
            self._resident = torch.zeros(end, dtype=dtype, device=device.place)
        else:
            self._resident = host_buffer(end * dtype.itemsize).view(dtype)

    def resident(self, unit: int) -> torch.Tensor | None:
        """The unit's elements where they live on the device."""
        if self.homes[unit] != DEVICE:
            return None
        return self._resident[self._starts[unit] :][: self.units[unit].elements]

    def direct(self, unit: int) -> torch.Tensor | None:
        """The unit's elements where the CPU can write them in place; None: `commit` what is new."""
        if self.homes[unit] == DEVICE:
            return None if self._device.is_cuda else self.resident(unit)
        return self.store.host(unit)

    def commit(self, unit: int, start: int, values: torch.Tensor, *, after: Any) -> Future:
        """Bring new weights (host memory, untouched until the future is done) from element `start` on to their home.

        `after`: the device's mark at which nothing computes with the old ones any more.
        """
        resident = self.resident(unit)
        if resident is not None:
            return self._device.upload(values, resident[start : start + values.numel()], after=after)
        return self.store.write(unit, start, values)

    def read(self, unit: int, start: int, buffer: torch.Tensor, *, after: Any) -> Future:
        """Fill `buffer` (host memory) with the weights from element `start` on, as they are.

        `after`: the device's mark at which they are there, if that is their home.
        """
        resident = self.resident(unit)
        if resident is not None:
            return self._device.download(resident[start : start + buffer.numel()], buffer, after=after)
        return self.store.read(unit, start, buffer)

    def source(self, unit: int) -> torch.Tensor | Read:
        """Where the weights of a unit that is away come from: host memory, or what reads them, for which this asks now.

        Several ranks read from a drive together what all of them need next, and bring it by parts from host memory.
        """
        host = self.store.host(unit)
        if host is not None:
            return self._gathers.want(unit, host) if self._gathers else host
        return self._reads.want(unit) if self._reads else lambda buffer: self.store.read(unit, 0, buffer)

    def cancel(self) -> None:
        """Nobody waits any more for what other ranks need not come to."""
        for together in (self._reads, self._gathers):
            if together is not None:
                together.cancel()

    def close(self) -> None:
        self.cancel()
        for together in (self._reads, self._gathers):
            if together is not None:
                together.close()
        self._node.close()  # its rounds are for these

    # -- with several ranks -------------------------------------------------------------------------------------------

    def broadcast(self) -> None:
        """What each rank has updated, on every rank's device and on every node; after `commit`s are done."""
        node = self._node
        for unit in self.units:
            self.spread_unit(unit)
        if len(node.nodes) > 1:
            node.barrier()  # what other nodes have sent is there for all ranks of this one

    def spread_unit(self, unit: Unit, *, beside: SideGroup | None = None) -> None:
        """The same of one unit; `beside`: of the thread that calls."""
        resident, node = self.resident(unit.index), self._node
        if resident is None:
            self._spread_over_nodes(unit, beside=beside)
            return
        for rank in range(node.world):
            first, end = stretch_of(unit, rank, ranks=node.world)
            node.broadcast(resident[first:end], source=rank, beside=beside)

    def _spread_over_nodes(self, unit: Unit, *, beside: SideGroup | None) -> None:
        """New weights that are there once a node, from their owner to the rank of its place on each other node."""
        node = self._node
        if len(node.nodes) == 1:
            return
        host = self.store.host(unit.index)
        for rank in node.alike:
            first, end = stretch_of(unit, rank, ranks=node.world)
            if host is not None:
                node.across(host[first:end], source=rank, beside=beside)
            elif first < end:
                through = host_buffer((end - first) * self.dtype.itemsize).view(self.dtype)
                if rank == node.rank:
                    self.store.read(unit.index, first, through).wait()
                node.across(through, source=rank, beside=beside)
                if rank != node.rank:
                    self.store.write(unit.index, first, through).wait()

    def complete(self, masters: torch.Tensor, unit: Unit, place: Place) -> None:
        """Fill a weight's masters, as far as ranks of other nodes update them, with theirs."""
        node = self._node
        node.complete(masters, [begin_in(place, unit, its.start, ranks=node.world) for its in node.nodes])

    def spread_all(self) -> None:
        """What rank 0 has on its device, on every rank's."""
        self._node.broadcast(self._resident, source=0)

    def spread_fixed(self) -> None:
        """What is not trained of what rank 0 has on its device, on every rank's."""
        for unit in self.units:
            resident = self.resident(unit.index)
            if resident is not None:
                self._node.broadcast(resident[unit.trained :], source=0)

    # -- single weights -----------------------------------------------------------------------------------------------

    def get(self, unit: int, start: int, count: int) -> torch.Tensor:
        """A copy of `count` elements on the CPU."""
        resident = self.resident(unit)
        if resident is not None:
            return resident[start : start + count].to("cpu", copy=True)
        return self.store.get(unit, start, count)

    def put(self, unit: int, start: int, values: torch.Tensor) -> None:
        """Set elements from `start` on. Then `flush`."""
        resident = self.resident(unit)
        if resident is not None:
            resident[start : start + values.numel()].copy_(values)
        else:
            self.store.put(unit, start, values)

    def put_page(self, unit: int, start: int, masters: torch.Tensor) -> None:
        """Set a page's elements to what is rounded out of its masters (fp32, on the CPU), and nothing beside them."""
        if self.homes[unit] in (DEVICE, RAM):
            self.put(unit, start, masters)
            return
        buffer = host_buffer(masters.numel() * self.dtype.itemsize).view(self.dtype)
        self.store.write(unit, start, buffer.copy_(masters)).wait()

    def flush(self) -> None:
        self.store.flush()
