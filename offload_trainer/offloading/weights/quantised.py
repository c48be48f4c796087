"""Quantise frozen weights when they are loaded, and dequantise them to the run's dtype each time they are used.

`plan/tiered/layout.py` describes the formats. Weights are quantised on the CPU, where they are read. On a CPU,
bitsandbytes' kernels return values in new memory, so a weight is dequantised in pieces.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.packages import to_install
from offload_trainer.plan.tiered.layout import PAD, PIECE, StoredWeight, Unit, WeightFormat, aligned

_ROW = PAD  # elements; bitsandbytes' CPU kernel for 4 bits dequantises rows in parallel
Read = Callable[[int, int], torch.Tensor]  # (first element of the store's dtype, number of them) -> CPU copy


class QuantisedUnit:
    """The stored form of one unit, and its conversion. Tensors are 1-D and in the store's dtype, the run's."""

    def __init__(self, unit: Unit, dtype: torch.dtype) -> None:
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
    def get(self, start: int, count: int, read: Read) -> torch.Tensor:
        """Return `count` elements from `start` on, where a frozen weight starts or inside the trained ones."""
        if start < self._trained:
            return read(start, count)
        weight, size = self._weights[start], self._dtype.itemsize
        if weight.format is None:
            return read(weight.values // size, count)

        def bytes_at(offset: int, length: int) -> torch.Tensor:
            return read(offset // size, -(-length // size)).view(torch.uint8)[:length]

        elements = aligned(count, PAD)
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
        weight, size = self._weights[start], self._dtype.itemsize
        assert aligned(values.numel(), PAD) == weight.elements or values.numel() == weight.elements
        if weight.format is None:
            return weight.values // size, values
        return weight.values // size, _stored(values, weight, weight.format).view(self._dtype)


def _stored(values: torch.Tensor, weight: StoredWeight, format: WeightFormat) -> torch.Tensor:
    """Return codes and scales (uint8) of a weight, quantised on the CPU in pieces."""
    functional, made = _bitsandbytes(format.name), torch.zeros(weight.end - weight.values, dtype=torch.uint8)
    codes, scales = made, made[weight.scales - weight.values :]
    for first in range(0, weight.elements, PIECE):
        piece = values[first : first + PIECE].to("cpu", torch.bfloat16)
        piece = torch.nn.functional.pad(piece, (0, aligned(piece.numel(), PAD) - piece.numel()))
        if format.bits == 4:
            some_codes, state = functional.quantize_4bit(piece, blocksize=format.block, quant_type=format.name)
        else:
            table = _table(torch.device("cpu"))
            some_codes, state = functional.quantize_blockwise(piece, code=table, blocksize=format.block)
        some_scales = state.absmax.to(torch.bfloat16).view(torch.uint8)
        codes[format.code_bytes(first) :][: some_codes.numel()] = some_codes.reshape(-1)
        scales[format.scale_bytes(first) :][: some_scales.numel()] = some_scales
    return made


def dequantise(codes: torch.Tensor, scales: torch.Tensor, format: WeightFormat, into: torch.Tensor) -> None:
    """Fill `into` with the values of codes (uint8) and scales (bf16) on the same device, a multiple of PAD of them."""
    functional, size = _bitsandbytes(format.name), into.numel() if into.is_cuda else PIECE
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
    """Import bitsandbytes.functional. Raises TrainerError if it cannot be imported."""
    try:
        from bitsandbytes import functional
    except Exception as error:  # its import loads a compiled library, and may raise anything
        raise TrainerError(
            f"base={format!r} needs bitsandbytes, which cannot be imported: {error}. {to_install('bitsandbytes')}"
        ) from error
    return functional
