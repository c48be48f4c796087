"""Checks for NaN, infinite or negative values in weights and optimizer state, on saving, exporting and loading.

A checkpoint with a NaN would in time replace the older checkpoints without one, and a model exported with a NaN outputs
only NaN.
"""

from __future__ import annotations

import torch


def describe_invalid_values(values: torch.Tensor, *, signed: bool = True) -> str | None:
    """Describe the invalid elements of `values` (a CPU tensor); return None if all are valid. Integer codes always are.

    `signed=False` is for squares or largest magnitudes, which must not be negative: the next update takes their square
    root or scales by them. The check is one pass at reading speed that allocates nothing: `aminmax` propagates NaN.
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
