"""Probe whether a model supports packing: several documents in a row give the same logits as each document alone.

    row        a a a a b b b c c c c        positions  0 1 2 3 0 1 2 0 1 2 3

transformers derives a mask between documents from positions that restart, if an architecture passes them on and carries
no other state from token to token (recurrent ones do). A list of such architectures would soon be outdated. So a tiny
model of the same kind (tiny_model.py) runs on three separate documents, on the packed row, and on the row without
positions. The last run shows that the probe would notice a difference.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.probes.tiny_model import twin_model
from offload_trainer.safe_files import one_line

_LENGTHS = 13, 9, 10  # tokens of the documents; windows and chunks of a tiny model have 8 tokens
_EQUAL, _SHOWS = 1e-4, 1e-2  # relative to the largest logit, in fp32: limit for equality; least effect of a crossing


def refuse_crossing(model: PreTrainedModel, *, trust_remote_code: bool) -> None:
    """Raise UserError if documents in a row influence each other in models like `model`, or if that is unknown."""
    name = type(model).__name__
    try:
        packed, crossed = _tried(model, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers' code may raise anything for an unusual configuration
        raise UserError(
            f"data.packing=on: a tiny {name} to try it on does not run ({one_line(error)}), so whether documents in a "
            "row stay apart is not known: leave data.packing out"
        ) from error
    if not (packed <= _EQUAL and crossed >= _SHOWS):  # a NaN is neither
        raise UserError(
            f"data.packing=on: in a row of several documents {name} computes something else than of each by itself (in "
            f"a trial logits are {packed:.0%} of the largest apart): it carries more from token to token than a mask "
            "holds back, or takes no positions. Leave data.packing out"
        )


def _tried(model: PreTrainedModel, *, trust_remote_code: bool) -> tuple[float, float]:
    """Return the largest relative difference between packed and separate logits, with and without positions."""
    with twin_model(model, trust_remote_code=trust_remote_code) as twin:
        return _compared(twin)


@torch.no_grad()
def _compared(twin: PreTrainedModel) -> tuple[float, float]:
    vocabulary = twin.config.get_text_config().vocab_size
    documents = [torch.randint(5, vocabulary - 5, (1, length)) for length in _LENGTHS]
    row = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]

    def logits(ids: torch.Tensor, **more: Any) -> torch.Tensor:
        return twin(input_ids=ids, use_cache=False, **more).logits.float()

    apart = torch.cat([logits(ids) for ids in documents], 1)
    largest = float(apart.abs().max())
    found = (logits(row, position_ids=positions), logits(row))
    packed, crossed = (float((one - apart).abs().max()) / largest for one in found)
    return packed, crossed
