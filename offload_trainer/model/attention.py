"""Attention with fewer heads of keys than of queries, on cards whose fast kernels take no such thing.

transformers hands such heads to torch with `enable_gqa`, which of torch's kernels only flash (and cuDNN's) take, and
they take neither fp32, nor cards before sm_80. What is left is the plain one, which makes the whole matrix of scores:
4 GB a layer for 32 heads and rows of 8192 tokens in fp16 (transformers #48633). There keys and values are repeated
first, as transformers does where there is a mask, and torch takes its memory-efficient kernel.
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
    """From now on and for the whole process: transformers' "sdpa" on a GPU. On a CPU it stays as it is, to the bit."""
    AttentionInterface.register("sdpa", _attention)


def needs_whole_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, dropout: float) -> bool:
    """Whether none of torch's fast kernels takes these as they are, on a GPU; torch is asked, which knows its cards."""
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
    """[rows, heads, tokens, size], with fewer heads in keys and values -> ([rows, tokens, heads, size], None)."""
    told: Any = module
    if _GROUPS in vars(module) and needs_whole_heads(query, key, value, dropout=dropout):
        groups = getattr(module, _GROUPS)
        key, value, told = repeat_kv(key, groups), repeat_kv(value, groups), with_groups(module, 1)
    return sdpa_attention_forward(told, query, key, value, attention_mask, dropout=dropout, **more)


def with_groups(module: nn.Module, groups: int) -> Any:
    """An attention module as transformers' function sees it, with so many heads of queries for each of keys."""
    return _Grouped(module, groups)


class _Grouped:
    """Without the number where it is one: older versions of that function pass `enable_gqa` for groups of one too."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        if groups > 1:
            vars(self)[_GROUPS] = groups

    def __getattr__(self, name: str) -> Any:
        if name == _GROUPS:
            raise AttributeError(name)
        return getattr(self._module, name)
