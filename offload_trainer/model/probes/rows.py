"""Probes of a model's rows: may a row hold several documents (packing), and may ranks divide it (sequence parallel)?

    packing    a a a a b b b c c c c   positions 0 1 2 3 0 1 2 0 1 2 3   must give the logits of each document alone
    sequence   a a a a | a a a a       positions 0 1 2 3 | 4 5 6 7       must give the logits of the whole row, if only
                                                                         attention sees both pieces

transformers derives a mask between documents from positions that restart, if an architecture passes them on and carries
no other state from token to token (recurrent ones do). Pieces of a row need a model that is position-wise except for
attention. A list of such architectures would soon be outdated. So a tiny model of the same kind (tiny_model.py) runs
both ways, and a third way that must differ, to show that it can: without positions, or with attention inside pieces.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.attention import share_rows
from offload_trainer.model.loss import adds_router_loss
from offload_trainer.model.probes.tiny_model import TrialFailed, random_ids, try_on_tiny_model

_EQUAL, _SHOWS = 1e-4, 1e-2  # relative to the largest logit, in fp32: limit for equality; least effect of a mistake
_LENGTHS = 13, 9, 10  # tokens of the documents; windows and chunks of a tiny model have 8 tokens
_TOKENS, _PIECES = 32, 2  # the divided row and its pieces
_OF_LENGTH = {"dynamic", "longrope"}  # rotary tables that depend on the largest position, which differs between pieces


def refuse_crossing(model: PreTrainedModel) -> None:
    """Raise UserError if documents in a row influence each other in models like `model`, or if that is unknown."""
    _refuse_differences(
        model,
        _compare_documents,
        key="data.packing=on",
        unknown="documents in a row stay apart is not known: leave data.packing out",
        differs="in a row of several documents {name} computes something else than of each by itself ({found}): it "
        "carries more from token to token than a mask holds back, or takes no positions. Leave data.packing out",
    )


def refuse_pieces(model: PreTrainedModel) -> None:
    """Raise UserError if pieces of rows would not give the results of whole rows, or if that cannot be probed."""
    name, key, text = type(model).__name__, "parallel.sequence", model.config.get_text_config()
    if text._attn_implementation != "sdpa":
        raise UserError(f"{key}: {name} runs with {text._attn_implementation} attention, and it needs sdpa")
    if adds_router_loss(model):
        raise UserError(f"{key}: the routers' loss (output_router_logits) is of all tokens of a row: set it to false")
    rotary = re.findall(r'"(?:rope_)?type": "(\w+)"', text.to_json_string(use_diff=False))
    if kinds := _OF_LENGTH.intersection(rotary):
        raise UserError(
            f"{key}: {name}'s rotary positions ({', '.join(sorted(kinds))}) depend on the length of the row, and each "
            "rank sees a piece of it"
        )
    _refuse_differences(
        model,
        _compare_pieces,
        key=key,
        unknown="its rows can be cut into pieces is not known: leave it out",
        differs=f"{{name}} computes something else of a row in {_PIECES} pieces ({{found}}): its tokens meet elsewhere "
        "than in attention to those before. Leave it out",
    )


def _refuse_differences(
    model: PreTrainedModel, compare: Callable[..., tuple[float, float]], *, key: str, unknown: str, differs: str
) -> None:
    """Raise UserError unless a tiny model's logits are equal in one way and differ in the other.

    `compare` returns both relative differences. `unknown` and `differs` end the messages about `key`.
    """
    name = type(model).__name__
    try:
        difference, effect = try_on_tiny_model(model, torch.no_grad()(compare))
    except TrialFailed as error:
        raise UserError(f"{key}: a tiny {name} to try it on does not run ({error}), so whether {unknown}") from error
    if not (difference <= _EQUAL and effect >= _SHOWS):  # a NaN is neither
        found = f"in a trial logits are {difference:.0%} of the largest apart"
        raise UserError(f"{key}: {differs.format(name=name, found=found)}")


def _compare_documents(tiny: PreTrainedModel) -> tuple[float, float]:
    """Return the difference between packed and separate documents, with and without positions."""
    documents = [random_ids(tiny, 1, length) for length in _LENGTHS]
    row = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    separate = torch.cat([_logits(tiny, ids) for ids in documents], 1)
    packed, crossed = _logits(tiny, row, position_ids=positions), _logits(tiny, row)
    return _difference(packed, separate), _difference(crossed, separate)


def _compare_pieces(tiny: PreTrainedModel) -> tuple[float, float]:
    """Return the difference between pieces and whole rows, with attention over all pieces and without."""
    rows = random_ids(tiny, 2, _TOKENS)
    pieces, places = (torch.cat(tokens.chunk(_PIECES, 1)) for tokens in (rows, torch.arange(_TOKENS).expand_as(rows)))

    def in_pieces() -> torch.Tensor:
        return torch.cat(_logits(tiny, pieces, position_ids=places).chunk(_PIECES), 1)

    whole, alone = _logits(tiny, rows), in_pieces()
    share_rows(tiny, _exchanged, count=_PIECES, name="sequence, tried")
    return _difference(in_pieces(), whole), _difference(alone, whole)


def _exchanged(parts: torch.Tensor) -> torch.Tensor:
    """Return what an all-to-all gives to each piece of a row: [pieces, pieces x rows, ...], stacked in one batch."""
    return parts.unflatten(1, (_PIECES, -1)).transpose(0, 1).flatten(1, 2)


def _logits(tiny: PreTrainedModel, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    return tiny(input_ids=ids, use_cache=False, **more).logits.float()


def _difference(one: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected logit."""
    return float((one - expected).abs().max()) / float(expected.abs().max())
