"""Read how an architecture's weights are split for tensor parallelism from transformers' `base_model_tp_plan`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from offload_trainer.plan.shape import Split

_SPLITS: dict[str, Split] = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "summed"}


def splits(model: PreTrainedModel, blocks: Sequence[str]) -> dict[str, Split]:
    """Return the split of each weight in the blocks by name, or {} if a matrix has no split that is supported here.

    Styles that need more than splitting (packed products, experts, gathered outputs) are not supported.
    """
    styles = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    if not styles or not set(styles.values()) <= set(_SPLITS):
        return {}
    prefix = re.escape(f"{model.base_model_prefix}.")
    patterns = {prefix + re.escape(name).replace(r"\*", "[0-9]+"): _SPLITS[style] for name, style in styles.items()}
    found: dict[str, Split] = {}
    for name, parameter in model.named_parameters():
        if not any(name.startswith(f"{block}.") for block in blocks):
            continue
        owner, _, leaf = name.rpartition(".")
        split: Split = next((its for pattern, its in patterns.items() if re.fullmatch(pattern, owner)), "")
        linear = type(model.get_submodule(owner)) is nn.Linear
        if parameter.dim() > 1 and not (linear and split in ("column", "row")):
            return {}
        if split:
            found[name] = "" if split == "row" and leaf == "bias" else split
    return found
