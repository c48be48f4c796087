"""Sequence parallel: each rank has a piece of a row's tokens, and attention sees whole rows of some of the heads.

    queries, keys, values   [rows, all heads, its tokens]  ──all-to-all──>  [rows, its heads, all tokens]
    result                  [rows, its tokens, all heads]  <──all-to-all──  [rows, all tokens, its heads]

DeepSpeed Ulysses (Jacobs et al. 2023). All else of a model looks at one token at a time, or the model is refused: which
ones are such no list says for long, so it is decided by trying (`refuse_pieces`). It goes through transformers'
interface of attention functions, so a model's code stays as it is. Heads of keys that the ranks do not divide are
repeated before they are sent, until they do.
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
from offload_trainer.model.twins import twin_model
from offload_trainer.readback import one_line

_NAME, _TRIED = "sequence", "sequence, tried"  # of transformers' attention functions
_TOKENS, _PIECES = 32, 2  # of the trial's row; a twin's windows are of 8 tokens
_EQUAL, _SHOWS = 1e-4, 1e-2  # of the largest logit: at most so far apart in fp32; pieces by themselves are farther
_OF_LENGTH = ("dynamic", "longrope")  # rotary tables that look at the largest position, which each piece has another

Send = Callable[[torch.Tensor], torch.Tensor]  # [count, ...]: part i to rank i -> what came of rank i as part i


class SharedRows:
    """Rows of which each of `count` ranks has a piece."""

    def __init__(self, send: Send, *, count: int) -> None:
        self.count, self._send = count, send

    def whole(self, states: torch.Tensor) -> torch.Tensor:
        """[rows, heads, tokens of a piece, size] -> [rows, heads / count, tokens, size]."""
        return self._sent(states)

    def piece(self, result: torch.Tensor) -> torch.Tensor:
        """[rows, tokens, heads / count, size] -> [rows, tokens of a piece, heads, size]."""
        return self._sent(result)

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        """[a, b, c, size], b in parts, one for each rank -> [a, b / count, c of all ranks, size]."""
        come: torch.Tensor = _Sent.apply(values.unflatten(1, (self.count, -1)).movedim(1, 0).contiguous(), self._send)
        return come.movedim(0, 2).flatten(2, 3)


class RowsBelow:
    """For the trial: pieces of the same rows lie one below the other in one batch, and nothing is divided."""

    count = 1

    def whole(self, states: torch.Tensor) -> torch.Tensor:
        """[pieces x rows, heads, tokens of a piece, size] -> [rows, heads, tokens, size]."""
        return states.unflatten(0, (_PIECES, -1)).movedim(0, 2).flatten(2, 3)

    def piece(self, result: torch.Tensor) -> torch.Tensor:
        """[rows, tokens, heads, size] -> [pieces x rows, tokens of a piece, heads, size]."""
        return result.unflatten(1, (_PIECES, -1)).movedim(1, 0).flatten(0, 1)


class _Sent(torch.autograd.Function):
    """Sends parts; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, send: Send) -> torch.Tensor:
        ctx.send = send
        return send(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.send(gradients[0].contiguous()), None


class DividedAttention:
    """An attention function of transformers': "sdpa", causal, over whole rows of this rank's heads.

    Of masks it knows a window's, which a module says (`sliding_window`); others are no part of that interface.
    """

    def __init__(self, rows: SharedRows | RowsBelow) -> None:
        self._rows = rows
        self._apart = False
        self._window: tuple[int, int] = 0, 0  # tokens, and how many of them a token sees
        self._mask: torch.Tensor | None = None  # of that window

    @contextmanager
    def apart(self) -> Iterator[None]:
        """In here rows are whole, and each rank computes its own."""
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
        """[rows, heads, tokens of a piece, size], fewer heads in keys and values -> [rows, tokens, heads, size]."""
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
        """bool [1, 1, tokens, tokens], which token sees which; None: each sees all before it. One is kept for all."""
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
    """From now on this rank has pieces of rows in `model`; `send` reaches all `count` that have the others."""
    made = DividedAttention(SharedRows(send, count=count))
    _set(model, made, name=_NAME)
    return made


def _set(model: PreTrainedModel, attention: DividedAttention, *, name: str) -> None:
    """ValueError where the model's attention is no function of that interface."""
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise ValueError("its attention is its own, and not transformers' interface")


# -- which architectures ----------------------------------------------------------------------------------------------


def refuse_pieces(model: PreTrainedModel, *, trust_remote_code: bool) -> None:
    """UserError where pieces of rows would not make what whole rows do in models like `model`, or nobody knows."""
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
    except Exception as error:  # of transformers' code, for a configuration that it did not expect
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
    """Those that a configuration names, however deep."""
    if not isinstance(held, dict):
        return set()
    named = {held[key] for key in ("rope_type", "type") if isinstance(held.get(key), str)}
    return named.union(*map(_rotary_kinds, held.values()))


@torch.no_grad()
def _compared(twin: PreTrainedModel) -> tuple[float, float]:
    """How far the logits of pieces are from those of whole rows, with attention over all of them and without."""
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
