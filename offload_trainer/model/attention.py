"""Attention functions for transformers: grouped heads on older GPUs, and rows that ranks share (DeepSpeed Ulysses).

Both are registered as transformers' attention functions, so the models' code stays unchanged.

**Grouped heads.** transformers passes grouped heads to torch with `enable_gqa`. Only torch's flash and cuDNN kernels
accept that, and they need 16-bit tensors and sm_80 or later. Otherwise torch falls back to the math kernel, which
allocates the whole score matrix: 4 GB per layer for 32 heads and rows of 8192 tokens in fp16 (transformers #48633). In
that case this module repeats keys and values first, as transformers does with a mask: torch has a kernel for that.

**Sequence parallelism.** A rank has a piece of every row; attention sees whole rows of its heads:

    queries, keys, values   [rows, all heads, its tokens]  ──all-to-all──>  [rows, its heads, all tokens]
    result                  [rows, its tokens, all heads]  <──all-to-all──  [rows, all tokens, its heads]

See Jacobs et al. 2023. Everything else in the model must be position-wise, which probes/rows.py tries. If the number of
key heads is not divisible by the ranks, key heads are repeated before they are sent.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.backends import cuda
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offload_trainer.errors import TrainerError

_GROUPS = "num_key_value_groups"
_MOST = 1000  # lengths of rows may vary
_WHOLE: dict[Any, bool] = {}  # what `needs_whole_heads` has returned
Send = Callable[[torch.Tensor], torch.Tensor]  # all-to-all: [count, ...] with part i for rank i -> parts from each rank


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
        key, value, view = repeat_kv(key, groups), repeat_kv(value, groups), _seen_as(module, groups=1)
    return sdpa_attention_forward(view, query, key, value, attention_mask, dropout=dropout, **more)


def _seen_as(module: nn.Module, *, groups: int) -> SimpleNamespace:
    """Return what transformers' function reads of a module, with `groups` query heads for each key head.

    With one group the attribute is absent, because older versions of transformers pass `enable_gqa` whenever it exists.
    """
    return SimpleNamespace(is_causal=getattr(module, "is_causal", True), **({_GROUPS: groups} if groups > 1 else {}))


# -- rows that ranks share ---------------------------------------------------------------------------------------------


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, send: Send) -> torch.Tensor:
        ctx.send = send
        return send(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.send(gradients[0].contiguous()), None


class DividedAttention:
    """An attention function for transformers: causal "sdpa" over whole rows of this rank's heads.

    `count` ranks have a piece of the same rows each, and exchange them by `send`. Its only mask is a sliding window.
    """

    def __init__(self, send: Send, *, count: int) -> None:
        self._send, self._count = send, count
        self._window: tuple[int, int] = 0, 0  # tokens in the row and in the window that `_mask` is for
        self._mask: torch.Tensor | None = None

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention: [rows, heads, tokens, size] -> ([rows, tokens, heads, size], None); tokens of a piece."""
        if attention_mask is not None:
            raise TrainerError(f"{type(module).__name__} makes a mask of its own, which is of a piece of a row")
        heads, of_keys, count = query.shape[1], key.shape[1], self._count
        if heads % count:
            raise TrainerError(f"{heads} attention heads are not a multiple of {count} ranks that share a row")
        sent = math.lcm(of_keys, count)
        key, value = (repeat_kv(states, sent // of_keys) for states in (key, value))
        view: Any = module if sent == of_keys else _seen_as(module, groups=heads // sent)
        query, key, value = map(self._exchanged, (query, key, value))
        result, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](view, query, key, value, self._seen(query, more), **more)
        return self._exchanged(result), None

    def _exchanged(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange pieces for heads: [rows, heads, tokens of a piece, size] -> [rows, heads / count, tokens, size].

        Or heads for pieces: [rows, tokens, heads / count, size] -> [rows, tokens of a piece, heads, size].
        """
        sent: torch.Tensor = _Sent.apply(states.unflatten(1, (self._count, -1)).movedim(1, 0).contiguous(), self._send)
        return sent.movedim(0, 2).flatten(2, 3)

    def _seen(self, query: torch.Tensor, more: dict[str, Any]) -> torch.Tensor | None:
        """Return the window's mask, bool [1, 1, tokens, tokens], or None without a window; the last mask is cached."""
        tokens, window = query.shape[2], more.get("sliding_window")
        if window is None or window >= tokens:
            return None
        if self._mask is None or self._window != (tokens, window):
            places = torch.arange(tokens, device=query.device)
            seen = places <= places[:, None]
            seen &= places > places[:, None] - window
            self._window, self._mask = (tokens, window), seen[None, None]
        return self._mask


def share_rows(model: PreTrainedModel, send: Send, *, count: int, name: str = "sequence") -> None:
    """Make `model` compute on pieces of rows that `count` ranks share, or raise ValueError if its attention cannot."""
    AttentionInterface.register(name, DividedAttention(send, count=count))
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise ValueError("its attention is its own, and not transformers' interface")
