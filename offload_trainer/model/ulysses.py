"""Sequence parallelism (DeepSpeed Ulysses): a rank has a piece of every row; attention sees whole rows of its heads.

    queries, keys, values   [rows, all heads, its tokens]  ──all-to-all──>  [rows, its heads, all tokens]
    result                  [rows, its tokens, all heads]  <──all-to-all──  [rows, all tokens, its heads]

See Jacobs et al. 2023. Everything else in the model must be position-wise; `refuse_pieces` probes a tiny model, because
a list of architectures would soon be outdated. The exchange is registered as one of transformers' attention functions,
so the model's code stays unchanged. If the number of key heads is not divisible by the ranks, key heads are repeated
before they are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.model.attention import with_groups
from offload_trainer.model.loss import adds_router_loss
from offload_trainer.model.probes.tiny_model import twin_model
from offload_trainer.safe_files import one_line

_NAME, _TRIED = "sequence", "sequence, tried"  # names of the attention functions in transformers' registry
_TOKENS, _PIECES = 32, 2  # the probe's row and its pieces; windows of a tiny model have 8 tokens
_EQUAL, _SHOWS = (
    1e-4,
    1e-2,
)  # relative to the largest logit, in fp32: limit for equality; least effect of separate pieces
_OF_LENGTH = ("dynamic", "longrope")  # rotary tables that depend on the largest position, which differs between pieces

Send = Callable[[torch.Tensor], torch.Tensor]  # all-to-all: [count, ...] with part i for rank i -> parts from each rank


class SharedRows:
    """The exchange between `count` ranks that each have a piece of the same rows."""

    def __init__(self, send: Send, *, count: int) -> None:
        self.count, self._send = count, send

    def whole(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange pieces for heads: [rows, heads, tokens of a piece, size] -> [rows, heads / count, tokens, size]."""
        return self._sent(states)

    def piece(self, result: torch.Tensor) -> torch.Tensor:
        """Exchange heads for pieces: [rows, tokens, heads / count, size] -> [rows, tokens of a piece, heads, size]."""
        return self._sent(result)

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        """Send parts of dimension 1 to the ranks: [a, b, c, size] -> [a, b / count, c of all ranks, size]."""
        come: torch.Tensor = _Sent.apply(values.unflatten(1, (self.count, -1)).movedim(1, 0).contiguous(), self._send)
        return come.movedim(0, 2).flatten(2, 3)


class RowsBelow:
    """A stand-in for the probe: the pieces of a row are stacked in one batch, and nothing is sent."""

    count = 1

    def whole(self, states: torch.Tensor) -> torch.Tensor:
        """Join pieces: [pieces x rows, heads, tokens of a piece, size] -> [rows, heads, tokens, size]."""
        return states.unflatten(0, (_PIECES, -1)).movedim(0, 2).flatten(2, 3)

    def piece(self, result: torch.Tensor) -> torch.Tensor:
        """Cut into pieces: [rows, tokens, heads, size] -> [pieces x rows, tokens of a piece, heads, size]."""
        return result.unflatten(1, (_PIECES, -1)).movedim(1, 0).flatten(0, 1)


class _Sent(torch.autograd.Function):
    """Send parts in the forward, and their gradients back in the backward."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, send: Send) -> torch.Tensor:
        ctx.send = send
        return send(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.send(gradients[0].contiguous()), None


class DividedAttention:
    """An attention function for transformers: causal "sdpa" over whole rows of this rank's heads.

    The only mask that it supports is a sliding window, which a module passes as `sliding_window`.
    """

    def __init__(self, rows: SharedRows | RowsBelow) -> None:
        self._rows = rows
        self._apart = False
        self._window: tuple[int, int] = 0, 0  # tokens in the row and in the window that `_mask` is for
        self._mask: torch.Tensor | None = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Compute attention without exchange inside the context: each rank has whole rows."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

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
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        if attention_mask is not None:
            raise TrainerError(f"{type(module).__name__} makes a mask of its own, which is of a piece of a row")
        if self._apart:
            seen = self._seen(query, more)
            return attend(module, query, key, value, seen, **more)
        heads, of_keys, count = query.shape[1], key.shape[1], self._rows.count
        if heads % count:
            raise TrainerError(f"{heads} attention heads are not a multiple of {count} ranks that share a row")
        sent = math.lcm(of_keys, count)
        key, value = (repeat_kv(states, sent // of_keys) for states in (key, value))
        told = module if sent == of_keys else with_groups(module, heads // sent)
        query, key, value = map(self._rows.whole, (query, key, value))
        result, _ = attend(told, query, key, value, self._seen(query, more), **more)
        return self._rows.piece(result), None

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


def share_rows(model: PreTrainedModel, *, send: Send, count: int) -> DividedAttention:
    """Make `model` compute on pieces of rows; `send` exchanges parts with the `count` ranks that share a row."""
    made = DividedAttention(SharedRows(send, count=count))
    _set(model, made, name=_NAME)
    return made


def _set(model: PreTrainedModel, attention: DividedAttention, *, name: str) -> None:
    """Set the attention function; raise ValueError if the model does not use transformers' attention interface."""
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise ValueError("its attention is its own, and not transformers' interface")


# -- supported architectures ------------------------------------------------------------------------------------------


def refuse_pieces(model: PreTrainedModel, *, trust_remote_code: bool) -> None:
    """Raise UserError if pieces of rows would not give the results of whole rows, or if that cannot be probed."""
    name, wish = type(model).__name__, "parallel.sequence"
    text = model.config.get_text_config()
    if text._attn_implementation != "sdpa":
        raise UserError(f"{wish}: {name} runs with {text._attn_implementation} attention, and it needs sdpa")
    if adds_router_loss(model):
        raise UserError(f"{wish}: the routers' loss (output_router_logits) is of all tokens of a row: set it to false")
    if kinds := _rotary_kinds(vars(text)) & set(_OF_LENGTH):
        raise UserError(
            f"{wish}: {name}'s rotary positions ({', '.join(sorted(kinds))}) depend on the length of the row, and each "
            "rank sees a piece of it"
        )
    try:
        with twin_model(model, trust_remote_code=trust_remote_code) as twin:
            whole, alone = _compared(twin)
    except Exception as error:  # transformers' code may raise anything for an unusual configuration
        raise UserError(
            f"{wish}: a tiny {name} to try it on does not run ({one_line(error)}), so whether its rows can be cut into "
            "pieces is not known: leave it out"
        ) from error
    if not (whole <= _EQUAL and alone >= _SHOWS):  # a NaN is neither
        raise UserError(
            f"{wish}: {name} computes something else of a row in {_PIECES} pieces (in a trial logits are {whole:.0%} "
            "of the largest apart): its tokens meet elsewhere than in attention to those before. Leave it out"
        )


def _rotary_kinds(held: Any) -> set[str]:
    """Return the rotary embedding types that a configuration names at any depth."""
    if not isinstance(held, dict):
        return set()
    named = {held[key] for key in ("rope_type", "type") if isinstance(held.get(key), str)}
    return named.union(*map(_rotary_kinds, held.values()))


@torch.no_grad()
def _compared(twin: PreTrainedModel) -> tuple[float, float]:
    """Return the relative difference of pieces to whole rows, with attention over all pieces and without."""
    vocabulary = twin.config.get_text_config().vocab_size
    rows = torch.randint(5, vocabulary - 5, (2, _TOKENS))
    expected = twin(input_ids=rows, use_cache=False).logits.float()
    pieces, places = (torch.cat(tokens.chunk(_PIECES, 1)) for tokens in (rows, torch.arange(_TOKENS).expand_as(rows)))
    attention = DividedAttention(RowsBelow())
    _set(twin, attention, name=_TRIED)

    def apart() -> float:
        logits = twin(input_ids=pieces, position_ids=places, use_cache=False).logits.float()
        found = torch.cat(logits.chunk(_PIECES), 1)
        return float((found - expected).abs().max() / expected.abs().max())

    with attention.apart():
        alone = apart()
    return apart(), alone
