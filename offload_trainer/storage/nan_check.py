"""Whether numbers can be weights and moments: looked at before they are saved or exported, and when they are loaded.

A NaN that is saved makes the older checkpoints go that had none, and a model that is exported with one gives only NaN.
"""

from __future__ import annotations

import torch


def unusable(values: torch.Tensor, *, signed: bool = True) -> str | None:
    """How many `values` (on the CPU) cannot be, in words; None where all can. Codes always can.

    Without a sign they are squares or greatest magnitudes: the next update takes a root of them, or turns a sign.
    One pass without memory of its own, at the speed of reading: a NaN is both the least and the greatest of all.
    """
    if not values.numel() or not values.is_floating_point():
        return None
    least, greatest = torch.aminmax(values)
    if least.isfinite() and greatest.isfinite() and (signed or least >= 0):
        return None
    wrong = ~values.isfinite()
    if not signed:
        wrong |= values < 0
    what = "NaN or infinite" if signed else "NaN, infinite or negative"
    return f"{int(wrong.sum())} of {values.numel()} values are {what}"
