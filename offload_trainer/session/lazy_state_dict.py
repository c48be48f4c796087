"""An offloaded model's state_dict as a list of weights that are read when something is done with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from offload_trainer.offloading.weights.lazy_weight import LazyWeight
from offload_trainer.offloading.weights.parameter import OffloadedParameter


def listed(
    model: nn.Module,
    read: Callable[[str], torch.Tensor],
    *,
    destination: Any = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> dict[str, Any]:
    """As `nn.Module.state_dict`; an offloaded weight's values are `read` by its name, each time anew.

    Embeddings, the head and vectors, which PEFT's adapters may be saved with, can be written by safetensors too.
    """
    found = {} if destination is None else destination
    tables = _tables(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, OffloadedParameter):
            keeps = parameter.dim() < 2 or parameter in tables
            found[prefix + name] = LazyWeight.of(parameter, partial(read, parameter.weight), keeps=keeps)
        else:
            found[prefix + name] = parameter if keep_vars else parameter.detach()
    for owner, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                found[f"{prefix}{owner}.{leaf}" if owner else prefix + leaf] = buffer
    return found


def _tables(model: nn.Module) -> set[nn.Parameter]:
    """Weights of embeddings, and of the head of a transformers model."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = [module for module in (*model.modules(), head) if isinstance(module, nn.Embedding) or module is head]
    return {weight for module in modules if isinstance(weight := getattr(module, "weight", None), nn.Parameter)}
