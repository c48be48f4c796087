"""Compare the results of trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Trainer

TIMES = ("runtime", "per_second", "total_flos", "step_time")


def told(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the log history without the entries that depend on the clock."""
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in TIMES)}
        for entry in trainer.state.log_history
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert torch.equal(one[name], tensor), name
