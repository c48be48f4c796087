"""Repeat key and value heads for grouped-query attention on GPUs whose fast kernels do not support it.

transformers passes grouped heads to torch with `enable_gqa`. Only torch's flash and cuDNN kernels accept that, and they
need 16-bit tensors and sm_80 or later. Otherwise torch falls back to the math kernel, which allocates the whole score
matrix: 4 GB per layer for 32 heads and rows of 8192 tokens in fp16 (transformers #48633). In that case this module
repeats keys and values first, as transformers does for attention with a mask, so that torch uses its memory-efficient
kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

_GROUPS = "num_key_value_groups"


def repeat_keys_where_needed() -> None:
    """Replace transformers' "sdpa" attention for the whole process. On a CPU its results do not change by a bit."""
    AttentionInterface.register("sdpa", _attention)


def needs_whole_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, dropout: float) -> bool:
    """Return whether no fast GPU kernel of torch accepts these tensors with grouped heads."""
    if not query.is_cuda:
        return False
    asked = SDPAParams(query, key, value, None, dropout, True, True)
    return not (can_use_flash_attention(asked) or can_use_cudnn_attention(asked))


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, repeating key and value heads if needed.

    `query`, `key` and `value` are [rows, heads, tokens, size]; keys and values may have fewer heads. Returns
    ([rows, tokens, heads, size], None).
    """
    view: Any = module
    if _GROUPS in vars(module) and needs_whole_heads(query, key, value, dropout=dropout):
        groups = getattr(module, _GROUPS)
        key, value, view = repeat_kv(key, groups), repeat_kv(value, groups), GroupedView(module, 1)
    return sdpa_attention_forward(view, query, key, value, attention_mask, dropout=dropout, **more)


class GroupedView:
    """A view of an attention module with another number of groups: query heads for each key head.

    With one group the attribute is absent, because older versions of transformers pass `enable_gqa` whenever it exists.
    """

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        if groups > 1:
            vars(self)[_GROUPS] = groups

    def __getattr__(self, name: str) -> Any:
        if name == _GROUPS:
            raise AttributeError(name)
        return getattr(self._module, name)
