"""Formats of frozen weights that are stored quantised (`model.base`), and where a unit's stored bytes hold each weight.

    in use   [ trained weights | frozen weights, each from a multiple of 256 elements on ]       in the run's dtype
    stored   [ trained weights | codes, scales | elements | codes, scales | ... | padding ]      bytes

A quantised weight is divided into blocks of consecutive elements. A code selects one of the format's numbers between -1
and 1, and an element is that number times the largest absolute value of its block, the scale. Weights are rounded to
bf16 before they are quantised. Scales are then bf16 numbers, so 2 bytes store them exactly, and the stored bytes do
not depend on the run's dtype. `offloading/weights/quantised.py` computes codes and values with bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload_trainer.plan.tiered.layout import Place

SCALE_BYTES = 2  # bf16
PIECE = 1 << 20  # elements that are quantised at a time, and on a CPU dequantised at a time
PAD = 256  # elements; quantised weights are padded with zeros to a multiple, so that all blocks are whole
_PART = 256  # bytes; codes, scales and elements start at multiples


@dataclass(frozen=True)
class WeightFormat:
    """A format of quantised weights."""

    name: str
    bits: int  # the size of a code
    block: int  # elements that share a scale; a divisor of PAD

    @property
    def bytes_each(self) -> float:
        """Return the bytes of an element, with its share of the scale."""
        return self.bits / 8 + SCALE_BYTES / self.block

    def code_bytes(self, elements: int) -> int:
        """Return the bytes of the codes of `elements`, a multiple of PAD."""
        return elements * self.bits // 8

    def scale_bytes(self, elements: int) -> int:
        """Return the bytes of the scales of `elements`, a multiple of PAD."""
        return elements // self.block * SCALE_BYTES


# nf4: the 16 numbers of NormalFloat (Dettmers et al. 2023, QLoRA). int8: k / 127 for k from -127 to 127.
FORMATS = {one.name: one for one in (WeightFormat("nf4", bits=4, block=64), WeightFormat("int8", bits=8, block=256))}


@dataclass(frozen=True)
class StoredWeight:
    """One frozen weight of a unit, as it is stored. Offsets are bytes from the start of the unit's stored bytes."""

    start: int  # its first element in the unit that is in use
    elements: int  # a multiple of PAD if it is quantised
    format: WeightFormat | None  # None: it is stored as it is used
    values: int  # offset of its codes, or of its elements
    scales: int  # offset of its scales
    end: int  # offset of the next weight

    def scratch_bytes(self, item_bytes: int, *, gpu: bool) -> int:
        """Return the temporary memory that dequantising it needs: its scales in fp32, and on a CPU a piece's values."""
        assert self.format is not None
        piece = self.elements if gpu else min(PIECE, self.elements)
        return 4 * piece // self.format.block + (0 if gpu else item_bytes * piece)


def padded(elements: int, to: int = PAD) -> int:
    """Return `elements` rounded up to a multiple of `to`."""
    return -(-elements // to) * to


def stored_weights(places: Iterable[Place], *, trained: int, item_bytes: int) -> tuple[StoredWeight, ...]:
    """Return the frozen weights of a unit as they are stored, after its `trained` elements of `item_bytes` each."""
    found, end = list[StoredWeight](), trained * item_bytes
    for place in places:
        weight, first = place.weight, end
        if weight.trainable:
            continue
        if not weight.quantised:
            end = padded(first + weight.numel * item_bytes, _PART)
            found.append(StoredWeight(place.start, weight.numel, None, first, end, end))
            continue
        format, elements = FORMATS[weight.quantised], padded(weight.numel)
        scales = padded(first + format.code_bytes(elements), _PART)
        end = padded(scales + format.scale_bytes(elements), _PART)
        found.append(StoredWeight(place.start, elements, format, first, scales, end))
    return tuple(found)
