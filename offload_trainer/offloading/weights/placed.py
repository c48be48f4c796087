"""Store the weights that the model computes with, by unit, on the device, in RAM or on drives.

The stored form of a unit is its elements, unless some of its frozen weights are quantised: on the CPU when they are
loaded, in the formats of `plan/tiered/layout.py`, and dequantised each time they are used. Trained elements are at the
same place in both forms, so the update does not distinguish them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from offload_trainer.common.errors import TrainerError
from offload_trainer.common.packages import to_install
from offload_trainer.offloading.device import DeviceCopy, Read
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Connections
from offload_trainer.plan.tiered import layout
from offload_trainer.plan.tiers import DEVICE, RAM
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future, done

if TYPE_CHECKING:
    from offload_trainer.offloading.allocation import EngineParts

_ROW = layout.PAD  # elements; bitsandbytes' CPU kernel for 4 bits dequantises rows in parallel
ReadPart = Callable[[int, int], torch.Tensor]  # (first element of the store's dtype, number of them) -> CPU copy


class PlacedWeights:
    """The weights of a model: one flat tensor in `dtype` for each unit, in its stored form."""

    def __init__(self, parts: EngineParts) -> None:
        """Allocate weights on the device, once per rank, and others in `store`, once per node. All ranks call it."""
        self.homes, self.dtype, self.units = parts.homes.weights, parts.dtype, parts.units
        self._node, self._device, drives = parts.node, parts.device, parts.drives
        sizes = [unit.stored_bytes(self.dtype.itemsize) for unit in self.units]
        self.store = UnitStore(
            [0 if home == DEVICE else size for size, home in zip(sizes, self.homes, strict=True)],
            [RAM if home == DEVICE else home for home in self.homes],
            dtype=self.dtype,
            files=drives.files("weights", sizes, self.homes),
            transfers=drives.transfers,
            pinned=self._device.is_cuda,
            node=self._node,
        )
        self._stored = [size // self.dtype.itemsize for size in sizes]  # elements
        self._quantised = {unit.index: QuantisedUnit(unit, self.dtype) for unit in self.units if unit.quantised}
        here = [index for index, home in enumerate(self.homes) if home == DEVICE]
        resident = [self._stored[index] for index in here]
        self._on_device = self._device.buffer(sum(resident), self.dtype)
        self.resident = dict(zip(here, self._on_device.split(resident), strict=True))  # unit -> its weights as stored

    def fetch(
        self, unit: int, source: torch.Tensor | Read, memory: torch.Tensor, packed: torch.Tensor, *, after: Any
    ) -> DeviceCopy:
        """Start to copy a unit to the device after the event `after`: to `memory`, or to `packed`, for `dequantise`."""
        if unit in self.resident:
            return done()
        into = packed if unit in self._quantised else memory
        return self._device.fetch(source, into[: self._stored[unit]], after=after)

    def dequantise(self, unit: int, packed: torch.Tensor, memory: torch.Tensor) -> None:
        """Fill `memory` with the elements of a unit that has been fetched, if it is quantised."""
        if unit in self._quantised:
            resident = self.resident.get(unit)
            self._quantised[unit].dequantise(packed[: self._stored[unit]] if resident is None else resident, memory)

    def commit(self, unit: int, start: int, values: torch.Tensor, *, after: Any) -> Future:
        """Write new weights, which must not change until the future completes, to the unit from element `start` on.

        `after` is the event on the device after which the old weights are no longer used.
        """
        if (resident := self.resident.get(unit)) is not None:
            return self._device.upload(values, resident[start : start + values.numel()], after=after)
        return self.store.write(unit, start, values)

    def broadcast(self) -> None:
        """Broadcast the weights that each rank has updated to all devices and nodes, after all `commit`s completed."""
        node = self._node
        for unit in self.units:
            self.broadcast_unit(unit)
        if len(node.nodes) > 1:
            node.barrier()  # all ranks of this node have received their parts from other nodes

    def broadcast_unit(self, unit: layout.Unit, *, connections: Connections | None = None) -> None:
        """Broadcast one unit's updated weights, between devices or, in RAM and on drives, between nodes."""
        node, resident, host = self._node, self.resident.get(unit.index), self.store.host(unit.index)
        across = node.counterparts if len(node.nodes) > 1 else ()  # RAM and drives are shared by a node's ranks
        for rank in range(node.world) if resident is not None else across:
            first, end = layout.range_of_rank(unit, rank, ranks=node.world)
            if resident is not None:
                node.broadcast(resident[first:end], source=rank, connections=connections)
            elif host is not None:
                node.broadcast_across(host[first:end], source=rank, connections=connections)
            elif first < end:
                through = host_buffer((end - first) * self.dtype.itemsize).view(self.dtype)
                if rank == node.rank:
                    self.store.read(unit.index, first, through).wait()
                node.broadcast_across(through, source=rank, connections=connections)
                if rank != node.rank:
                    self.store.write(unit.index, first, through).wait()

    def complete(self, masters: torch.Tensor, unit: layout.Unit, place: layout.Place) -> None:
        """Fill in the parts of a weight's masters that other nodes update. All ranks call it."""
        node = self._node
        starts = [layout.range_of_rank(unit, its.start, ranks=node.world)[0] - place.start for its in node.nodes]
        begins = [min(max(0, start), masters.numel()) for start in starts]
        for source, first, end in zip(node.counterparts, begins, [*begins[1:], masters.numel()], strict=True):
            node.broadcast_across(masters[first:end], source=source)

    def broadcast_all(self) -> None:
        """Broadcast rank 0's weights on the device to all ranks."""
        self._node.broadcast(self._on_device, source=0)

    def get(self, unit: int, start: int, count: int) -> torch.Tensor:
        """Return a CPU copy of `count` elements from `start` on; of a frozen weight, from its start on."""
        resident = self.resident.get(unit)

        def read(start: int, count: int) -> torch.Tensor:
            if resident is None:
                return self.store.get(unit, start, count)
            return resident[start : start + count].to("cpu", copy=True)

        return self._quantised[unit].get(start, count, read) if unit in self._quantised else read(start, count)

    def put(self, unit: int, start: int, values: torch.Tensor) -> None:
        """Round `values` to elements from `start` on; of a frozen weight in a quantised unit, all."""
        if unit in self._quantised:
            start, values = self._quantised[unit].stored(start, values)
        if (resident := self.resident.get(unit)) is not None:
            resident[start : start + values.numel()].copy_(values)
        else:
            self.store.put(unit, start, values)


class QuantisedUnit:
    """The stored form of one unit, and its conversion. Tensors are 1-D and in the store's dtype, the run's."""

    def __init__(self, unit: layout.Unit, dtype: torch.dtype) -> None:
        self._dtype, self._trained = dtype, unit.trained
        self._weights = {weight.start: weight for weight in unit.stored_weights(dtype.itemsize)}

    @torch.no_grad()
    def dequantise(self, stored: torch.Tensor, memory: torch.Tensor) -> None:
        """Write the unit's elements to `memory` from its stored form on the same device."""
        data = stored.view(torch.uint8)
        memory[: self._trained].copy_(stored[: self._trained])
        for weight in self._weights.values():
            values = memory[weight.start : weight.start + weight.elements]
            if weight.format is None:
                values.copy_(data[weight.values :][: values.nbytes].view(self._dtype))
            else:
                codes = data[weight.values :][: weight.format.code_bytes(weight.elements)]
                scales = data[weight.scales :][: weight.format.scale_bytes(weight.elements)]
                dequantise(codes, scales.view(torch.bfloat16), weight.format, values)

    @torch.no_grad()
    def get(self, start: int, count: int, read: ReadPart) -> torch.Tensor:
        """Return `count` elements from `start` on, where a frozen weight starts or inside the trained ones."""
        if start < self._trained:
            return read(start, count)
        weight, size = self._weights[start], self._dtype.itemsize
        if weight.format is None:
            return read(weight.values // size, count)

        def bytes_at(offset: int, length: int) -> torch.Tensor:
            return read(offset // size, -(-length // size)).view(torch.uint8)[:length]

        elements = layout.aligned(count, layout.PAD)
        codes = bytes_at(weight.values, weight.format.code_bytes(elements))
        scales = bytes_at(weight.scales, weight.format.scale_bytes(elements))
        values = torch.empty(elements, dtype=self._dtype)
        dequantise(codes, scales.view(torch.bfloat16), weight.format, values)
        return values[:count]

    @torch.no_grad()
    def stored(self, start: int, values: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return the stored form of a whole frozen weight or of trained elements, and the element where it belongs."""
        if start < self._trained:
            return start, values
        weight, first = self._weights[start], self._weights[start].values // self._dtype.itemsize
        assert layout.aligned(values.numel(), layout.PAD) == weight.elements or values.numel() == weight.elements
        if (format := weight.format) is None:
            return first, values
        functional, made = _bitsandbytes(format.name), torch.zeros(weight.end - weight.values, dtype=torch.uint8)
        codes, scales = made, made[weight.scales - weight.values :]
        for at in range(0, weight.elements, layout.PIECE):  # quantised on the CPU
            piece = values[at : at + layout.PIECE].to("cpu", torch.bfloat16)
            piece = torch.nn.functional.pad(piece, (0, layout.aligned(piece.numel(), layout.PAD) - piece.numel()))
            if format.bits == 4:
                some_codes, state = functional.quantize_4bit(piece, blocksize=format.block, quant_type=format.name)
            else:
                table = _table(torch.device("cpu"))
                some_codes, state = functional.quantize_blockwise(piece, code=table, blocksize=format.block)
            some_scales = state.absmax.to(torch.bfloat16).view(torch.uint8)
            codes[format.code_bytes(at) :][: some_codes.numel()] = some_codes.reshape(-1)
            scales[format.scale_bytes(at) :][: some_scales.numel()] = some_scales
        return first, made.view(self._dtype)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, format: layout.WeightFormat, into: torch.Tensor) -> None:
    """Fill `into` with the values of codes (uint8) and scales (bf16) on the same device, a multiple of PAD of them."""
    functional, size = _bitsandbytes(format.name), into.numel() if into.is_cuda else layout.PIECE
    for first in range(0, into.numel(), size):
        piece = into[first : first + size]
        some_codes = codes[format.code_bytes(first) :][: format.code_bytes(piece.numel())]
        absmax = scales[first // format.block :][: piece.numel() // format.block].float()
        shape = piece.shape if into.is_cuda else torch.Size((piece.numel() // _ROW, _ROW))
        state = functional.QuantState(
            absmax, shape=shape, dtype=into.dtype, blocksize=format.block, quant_type=format.name
        )
        out = piece if into.is_cuda else None
        if format.bits == 4:
            values = functional.dequantize_4bit(some_codes.view(-1, 1), state, out=out)
        else:
            state.code = _table(codes.device)
            values = functional.dequantize_blockwise(some_codes, state, out=out)
        if out is None:
            piece.copy_(values.reshape(-1))


@cache
def _table(device: torch.device) -> torch.Tensor:
    """Return the numbers that the codes of int8 select: k / 127 for code k + 128; code 0 is -1 too.

    bitsandbytes' create_linear_map also has the number 4e-9, so rounded values would be rounded again.
    """
    return (torch.arange(-128, 128) / 127).clamp(min=-1).to(device)


@cache
def _bitsandbytes(format: str) -> ModuleType:
    try:
        from bitsandbytes import functional
    except Exception as error:  # its import loads a compiled library, and may raise anything
        raise TrainerError(
            f"base={format!r} needs bitsandbytes, which cannot be imported: {error}. {to_install('bitsandbytes')}"
        ) from error
    return functional
