"""Counts of the matrix products that one token causes in a transformers model, from which the planner derives FLOPs.

A matrix takes part in one product per token for each module that uses it. An embedding that is only looked up takes
part in none, and an expert of E in k / E if each token is sent to k of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# names that configurations use for k
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")


def products_of(model: PreTrainedModel) -> dict[str, float]:
    """Return for each parameter the number of products per token in which its elements take part.

    It is 0 for biases and norms.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = dict.fromkeys(names.values(), 0.0)
    active = _experts_a_token(of_layer(model.config.get_text_config(), 0))
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and not leaf.endswith("bias"):
                found[names[id(parameter)]] += _share(model, path, module, parameter, active=active)
    return found


def _share(model: PreTrainedModel, path: str, module: nn.Module, parameter: nn.Parameter, *, active: int) -> float:
    """Return the share of a module's weight that one token is multiplied with.

    It is below 1 for experts, whether they are in one tensor or in separate modules.
    """
    if parameter.dim() == 3 and not isinstance(module, nn.Conv1d):
        # Experts whose forward does not receive the router's choice compute every expert for every token.
        told = len(inspect.signature(type(module).forward).parameters) > 2
        return min(1.0, active / parameter.shape[0]) if told and active else 1.0
    before, found, _ = path.rpartition(".experts.")
    experts = model.get_submodule(f"{before}.experts") if found else None
    return min(1.0, active / len(experts)) if isinstance(experts, nn.ModuleList) and active else 1.0


def _experts_a_token(config: Any) -> int:
    """Return k, or 0 if the configuration does not state it."""
    for held in (config, getattr(config, "ffn_config", None)):
        for key in _EXPERTS_A_TOKEN:
            value = getattr(held, key, None)
            if isinstance(value, int):
                return value
    return 0


def attention_widths(model: PreTrainedModel, blocks: Sequence[str]) -> tuple[int, ...]:
    """Return heads x (key size + value size) for each block, or 0 for a block without attention."""
    config = model.config.get_text_config()
    return tuple(
        sum(
            _width(module, of_layer(config, getattr(module, "layer_idx", None)))
            for module in model.get_submodule(block).modules()
            if hasattr(module, "is_causal")
        )
        for block in blocks
    )


def of_layer(config: Any, number: int | None) -> Any:
    """Return the configuration of one layer if layers have separate ones, otherwise the model's."""
    return config.per_layer_config[number or 0] if getattr(config, "is_heterogeneous", False) else config


def _width(module: nn.Module, config: Any) -> int:
    """Return the width of one attention module; query heads count, since each uses the grouped keys and values."""
    heads = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", 0)
    head = getattr(module, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(module, "qk_head_dim", None) or head
    return int(heads * (keys + (getattr(module, "v_head_dim", None) or head)))
