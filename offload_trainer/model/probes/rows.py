"""Probe whether documents in one row influence each other (packing).

transformers derives a mask between documents from positions that restart, if an architecture passes them on and carries
no other state from token to token (recurrent ones do). A list of such architectures would soon be outdated, so a tiny
model of the same kind (tiny_model.py) computes a row of several documents and each by itself, and, to show that
it can tell, the row without positions.
"""

import torch
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.model.probes.tiny_model import TrialFailed, random_ids, try_on_tiny_model

_EQUAL, _SHOWS = 1e-4, 1e-2  # relative to the largest logit, in fp32: limit for equality; least effect of a mistake
_LENGTHS = 13, 9, 10  # tokens of the documents; windows and chunks of a tiny model have 8 tokens


def refuse_crossing(model: PreTrainedModel) -> None:
    """Raise UserError if documents in a row influence each other in models like `model`, or if that is unknown."""
    name, key = type(model).__name__, "data.packing=on"
    try:
        difference, effect = try_on_tiny_model(model, torch.no_grad()(_compare_documents))
    except TrialFailed as error:
        raise UserError(
            f"{key}: a tiny {name} to try it on does not run ({error}), so whether documents in a row stay apart is "
            "not known: leave data.packing out"
        ) from error
    if not (difference <= _EQUAL and effect >= _SHOWS):  # a NaN is neither
        raise UserError(
            f"{key}: in a row of several documents {name} computes something else than of each by itself (in a trial "
            f"logits are {difference:.0%} of the largest apart): it carries more from token to token than a mask holds "
            "back, or takes no positions. Leave data.packing out"
        )


def _compare_documents(tiny: PreTrainedModel) -> tuple[float, float]:
    """Return the relative difference between packed and separate documents, with and without positions."""
    documents = [random_ids(tiny, 1, length) for length in _LENGTHS]
    row = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    separate = torch.cat([_logits(tiny, ids) for ids in documents], 1)
    packed, crossed = _logits(tiny, row, position_ids=positions), _logits(tiny, row)
    return _difference(packed, separate), _difference(crossed, separate)


def _logits(tiny: PreTrainedModel, ids: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    return tiny(input_ids=ids, use_cache=False, **more).logits.float()


def _difference(one: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected logit."""
    return float((one - expected).abs().max()) / float(expected.abs().max())
