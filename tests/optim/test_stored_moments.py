"""Tests of training with moments of each precision: the largest update, in units of the rate, with rare token ids."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from engine_bench import VOCABULARY, engine, masters, model_directory

from offload_trainer.data.rows import Batch, DataState
from offload_trainer.telemetry.meters import PhaseClock

LR, STEPS = 1e-3, 24
WORDS = ["--dtype", "fp32", "optim.weight_decay=0", "--lr", str(LR)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("model"), "qwen3", tied=False)


def rare_ids() -> list[Batch]:
    """Return rows of ids with frequencies 1 / rank ^ 2, so that many occur only once or twice."""
    random = torch.Generator().manual_seed(3)
    weights = 1 / torch.arange(1.0, VOCABULARY + 1) ** 2
    made = []
    for _ in range(STEPS):
        tokens = torch.multinomial(weights, 4 * 25, replacement=True, generator=random).view(4, 25)
        made.append(Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:], state=DataState(0)))
    return made


def largest_update(trained, data: list[Batch]) -> float:
    """Return the largest change of a weight in a step, in units of the rate."""
    largest, before = 0.0, masters(trained)
    for batch in data:
        trained.train_step([batch], lr=LR, clock=PhaseClock())
        after = masters(trained)
        largest = max(largest, *(float((after[name] - before[name]).abs().max()) / LR for name in after))
        before = after
    return largest


@cache
def largest_of_bitsandbytes(model: Path) -> float:
    """Return the largest update of bitsandbytes' CPU code on the same masters and gradients."""
    AdamW8bit = pytest.importorskip("bitsandbytes.optim").AdamW8bit

    with engine(model, "--engine", "plain", *WORDS) as reference:
        parameters = list(reference._masters.values())
        reference._adam = AdamW8bit(parameters, betas=(0.9, 0.95), weight_decay=0.0, min_8bit_size=1)
        return largest_update(reference, rare_ids())


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_rare_ids_make_no_large_update(states: str, kernel: str, model: Path) -> None:
    with engine(model, *WORDS, f"optim.moment_dtype={states}", f"optim.kernel={kernel}") as ours:
        largest = largest_update(ours, rare_ids())
    assert largest < (2 if states == "fp32" else 10)
    assert largest < 3 * largest_of_bitsandbytes(model)
