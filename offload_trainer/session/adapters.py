"""Merge PEFT's LoRA adapters into offloaded weights during export, one weight at a time, with PEFT's merge code."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from offload_trainer.errors import UserError
from offload_trainer.offloading.weights.parameter import OffloadedParameter

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

Change = Callable[[str, torch.Tensor], torch.Tensor]  # (name, fp32 values) -> values to export


def merging(model: nn.Module) -> Change | None:
    """Return a function that merges the active adapters of `model` into a weight; None if it has no adapters.

    The merge is done in the weight's dtype. Raises UserError for parameters that are neither offloaded nor part of an
    adapter that can be merged.
    """
    layers: dict[str, list[LoraLayer]] = {}
    dtypes: dict[str, torch.dtype] = {}
    merged: set[nn.Parameter] = set()
    for layer in _lora_layers(model):
        weight = getattr(layer.get_base_layer(), "weight", None)
        if isinstance(weight, OffloadedParameter) and not any(getattr(layer, "lora_bias", {}).values()):
            layers.setdefault(weight.weight, []).append(layer)
            dtypes[weight.weight] = weight.dtype
            merged |= set(layer.parameters())
    left = [
        name
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, OffloadedParameter) and parameter not in merged
    ]
    if left:
        raise UserError(
            f"{len(left)} parameters cannot be merged into the model's weights ({left[0]}, ...): use merge=False to "
            "write the weights without them, and their library's save_pretrained to write them"
        )

    @torch.no_grad()
    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        for layer in layers.get(name, ()):
            weight = _merged(layer, weight.to(dtypes[name]))
        return weight

    return change if layers else None


def _lora_layers(model: nn.Module) -> list[LoraLayer]:
    """Return the LoRA layers of `model`, without importing PEFT: if nothing has imported it, there are none."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _merged(layer: LoraLayer, weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` after PEFT's merge, run on a copy of the layer whose base holds only that weight."""
    base, one = copy.copy(layer.get_base_layer()), copy.copy(layer)
    base._parameters = {"weight": nn.Parameter(weight.to(_place(layer)), requires_grad=False)}
    one._modules = {**layer._modules, "base_layer": base}
    one.merged_adapters = []
    one.merge()
    return base.weight.detach().cpu()


def _place(layer: LoraLayer) -> torch.device:
    return next(p.device for p in layer.parameters() if not isinstance(p, OffloadedParameter))
