"""Read a moment (exp_avg or exp_avg_sq) of a page as fp32 and write it back in its storage format.

    fp32   unchanged       bf16   rounded stochastically        8bit   codes, and a scale for each 256 elements

Without random bits, as in a conversion, moments are rounded to nearest. 8-bit first moments always are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from offload_trainer.optim.moments import Bits, decode_8bit, decode_bf16, encode_8bit, encode_bf16, zero_code
from offload_trainer.plan.tiered.layout import BLOCK_8BIT
from offload_trainer.plan.tiered.state_formats import Moment, StateFormat, scales_of
from offload_trainer.storage.dtypes import DTYPES


@dataclass(frozen=True)
class StoredMoment:
    """A moment of a page: `values` (n entries) and, in 8 bits, `scales` (fp32[ceil(n / 256)]), views of its fields."""

    moment: Moment
    values: torch.Tensor
    scales: torch.Tensor | None

    def read(self) -> torch.Tensor:
        """Return the values as fp32[n]; fp32 values are not copied."""
        if self.values.dtype is torch.float32:
            return self.values
        wide = torch.empty(self.values.numel())
        if self.scales is None:
            decode_bf16(self.values, wide)
        else:
            decode_8bit(self.values, self.scales, wide, signed=self.moment.signed)
        return wide

    def write(self, values: torch.Tensor, *, noise: Bits | None = None) -> None:
        """Store `values` (fp32[n]), rounded stochastically by the bits of `noise` if the format is stochastic."""
        if self.scales is not None:
            given = None if self.moment.signed else noise
            encode_8bit(values, self.values, self.scales, signed=self.moment.signed, noise=given)
        elif self.values.dtype is torch.bfloat16 and noise is not None:
            encode_bf16(values, self.values, noise=noise)
        else:
            self.values.copy_(values)

    def start_at_zero(self) -> None:
        """Set a moment whose bytes are all zero to the value zero; in 8 bits code 0 is the lowest number instead."""
        if self.scales is not None:
            self.values.fill_(zero_code(signed=self.moment.signed))


def stored_moment(moment: Moment, fields: Mapping[str, torch.Tensor], here: slice | None = None) -> StoredMoment:
    """Return a moment of a page's elements `here`, which start at a multiple of 256, or of all elements."""
    values, scales = fields[moment.name], fields.get(scales_of(moment.name))
    if here is not None:
        values = values[here]
        scales = None if scales is None else scales[here.start // BLOCK_8BIT : -(-here.stop // BLOCK_8BIT)]
    return StoredMoment(moment, values, scales)


def empty_fields(format: StateFormat, n: int) -> dict[str, torch.Tensor]:
    """Return uninitialised fields for a page of `n` elements."""
    return {name: torch.empty(field.entries(n), dtype=DTYPES[field.dtype]) for name, field in format.fields.items()}
