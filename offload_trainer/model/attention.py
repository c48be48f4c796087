"""An attention function for transformers that repeats grouped heads where no fast kernel of torch accepts them.

transformers passes grouped heads to torch with `enable_gqa`. Only torch's flash and cuDNN kernels accept that, and they
need 16-bit tensors and sm_80 or later. Otherwise torch falls back to the math kernel, which allocates the whole score
matrix: 4 GB per layer for 32 heads and rows of 8192 tokens in fp16 (transformers #48633). In that case this module
repeats keys and values first, as transformers does with a mask: torch has a kernel for that.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.backends import cuda
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

_GROUPS = "num_key_value_groups"
_MOST = 1000  # lengths of rows may vary
_WHOLE: dict[Any, bool] = {}  # cached results of `needs_whole_heads`


def repeat_keys_where_needed() -> None:
    """Replace transformers' "sdpa" attention for the whole process. On a CPU its results do not change by a bit."""
    AttentionInterface.register("sdpa", _attention)


def needs_whole_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, dropout: float) -> bool:
    """Return whether no fast GPU kernel of torch accepts these tensors with grouped heads."""
    if not query.is_cuda:
        return False
    # torch's answer takes as long as a kernel's launch, and is the same for every block.
    tensors = tuple((one.shape, one.stride(), one.dtype, one.requires_grad) for one in (query, key, value))
    asked = tensors, dropout, cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled()
    if asked not in _WHOLE:
        if len(_WHOLE) >= _MOST:
            _WHOLE.clear()
        params = cuda.SDPAParams(query, key, value, None, dropout, True, True)
        _WHOLE[asked] = not (cuda.can_use_flash_attention(params) or cuda.can_use_cudnn_attention(params))
    return _WHOLE[asked]


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with all or fewer heads of keys and values: [rows, heads, tokens, size] -> [rows, tokens, heads, size]."""
    view: Any = module
    if _GROUPS in vars(module) and needs_whole_heads(query, key, value, dropout=dropout):
        groups = getattr(module, _GROUPS)
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        # What transformers' function reads of a module. Older versions pass `enable_gqa` if it has `_GROUPS`.
        view = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(view, query, key, value, attention_mask, dropout=dropout, **more)
