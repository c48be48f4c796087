"""Make small image-text models with random weights, and batches and rows with images for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from tiny_image_models import PATCHES, Batch, image_batches, kinds, tiny_image_config, tiny_image_model

__all__ = ["PATCHES", "Batch", "image_model", "image_rows", "opened", "stacked"]


def image_model(folder: Path, name: str, *, batches: int, seed: int = 1, **changes: Any) -> list[Batch]:
    """Write a small fp32 model, with random weights large enough that images change the loss; return batches for it.

    `changes` are made in the configuration. The sizes of its weights are multiples of 16, for the reason in
    test_against_torch.py.
    """
    config = tiny_image_config(kinds()[name])
    for key, value in changes.items():
        setattr(config, key, value)
    tiny_image_model(config, seed=seed).save_pretrained(folder)
    return image_batches(opened(folder), batches)


def opened(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model


def image_rows(batches: Sequence[Batch]) -> list[dict[str, torch.Tensor]]:
    """Return the rows of batches whose tensors have one entry a row, as a data set has them."""
    return [
        {key: values[number] for key, values in batch.items()}
        for batch in batches
        for number in range(len(batch["input_ids"]))
    ]


def stacked(rows: Sequence[dict[str, torch.Tensor]]) -> Batch:
    """Collate rows into a batch."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
