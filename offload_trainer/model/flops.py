"""What a token is multiplied with on its way through a model, read off transformers' modules: counts for the plan.

A matrix takes part in one product a token for each module that holds it, an embedding that is only looked up in none,
one expert of E in k / E, where k of them see a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_EXPERTS_A_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")  # as configurations call k


def products_of(model: PreTrainedModel) -> dict[str, float]:
    """By parameter's name: in how many products its elements are, for one token; 0 for biases and norms."""
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
    """Of a module's weight, what one token meets: less than all of it for experts, kept in one tensor or apart."""
    if parameter.dim() == 3 and not isinstance(module, nn.Conv1d):
        # Some compute every expert for every token: they are not told which of them were chosen.
        told = len(inspect.signature(type(module).forward).parameters) > 2
        return min(1.0, active / parameter.shape[0]) if told and active else 1.0
    before, found, _ = path.rpartition(".experts.")
    experts = model.get_submodule(f"{before}.experts") if found else None
    return min(1.0, active / len(experts)) if isinstance(experts, nn.ModuleList) and active else 1.0


def _experts_a_token(config: Any) -> int:
    """k, or 0 where no key says it."""
    for held in (config, getattr(config, "ffn_config", None)):
        for key in _EXPERTS_A_TOKEN:
            value = getattr(held, key, None)
            if isinstance(value, int):
                return value
    return 0


def attention_widths(model: PreTrainedModel, blocks: Sequence[str]) -> tuple[int, ...]:
    """For each block, heads x (size of a key + size of a value); 0 where it has no attention."""
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
    """The configuration of one layer, where layers have configurations of their own; else the model's."""
    return config.per_layer_config[number or 0] if getattr(config, "is_heterogeneous", False) else config


def _width(module: nn.Module, config: Any) -> int:
    """Grouped keys and values are met by every head, so heads of queries count."""
    heads = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", 0)
    head = getattr(module, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(module, "qk_head_dim", None) or head
    return int(heads * (keys + (getattr(module, "v_head_dim", None) or head)))
