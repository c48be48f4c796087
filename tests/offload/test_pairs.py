"""Test that placement and schedule change no bit, for every pair of placement, schedule, dtype, moments and more.

Moments in fp32 are compared with plain torch, the others with the tiered engine whose state is all in RAM and whose
update overlaps nothing.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from engine_bench import DROPOUT, REFERENCE, Step, assert_same, batches, engine, masters, model_directory, train
from test_overlap import HOMES

pytestmark = pytest.mark.usefixtures("nothing_is_small")

STEPS = 3

Case = tuple[str, str, str, str, int, str, int]
# Placement, overlap, dtype, moments, micro-batches, activation checkpointing, limit of the norm: found by a search for
# the fewest rows in which every pair occurs.
CASES: list[Case] = [
    ("all in RAM", "off", "fp32", "8bit", 1, "off", 1000),
    ("all in RAM", "forward", "fp16", "bf16", 3, "on", 1000),
    ("all in RAM", "backward", "bf16", "fp32", 1, "off", 1),
    ("a third in RAM", "off", "fp32", "8bit", 1, "off", 1000),
    ("a third in RAM", "forward", "fp16", "fp32", 3, "off", 1000),
    ("a third in RAM", "backward", "bf16", "bf16", 3, "on", 1),
    ("nothing in RAM", "off", "bf16", "8bit", 3, "off", 1),
    ("nothing in RAM", "forward", "fp16", "fp32", 1, "on", 1000),
    ("nothing in RAM", "backward", "fp32", "bf16", 3, "on", 1),
    ("weights in RAM", "off", "bf16", "fp32", 3, "on", 1000),
    ("weights in RAM", "forward", "fp32", "8bit", 1, "off", 1),
    ("weights in RAM", "backward", "fp16", "bf16", 3, "on", 1000),
    ("weights and gradients on the drive", "off", "fp16", "bf16", 3, "off", 1),
    ("weights and gradients on the drive", "forward", "bf16", "fp32", 1, "on", 1),
    ("weights and gradients on the drive", "backward", "fp32", "8bit", 1, "on", 1000),
    ("a part on the device", "off", "bf16", "bf16", 1, "on", 1000),
    ("a part on the device", "forward", "fp16", "8bit", 3, "off", 1),
    ("a part on the device", "backward", "fp32", "fp32", 3, "off", 1000),
    ("all on the device", "off", "fp16", "8bit", 1, "on", 1),
    ("all on the device", "forward", "bf16", "bf16", 3, "off", 1000),
    ("all on the device", "backward", "fp32", "fp32", 1, "on", 1000),
    ("state on the device, weights on the drive", "off", "fp16", "fp32", 3, "on", 1),
    ("state on the device, weights on the drive", "forward", "bf16", "bf16", 3, "off", 1),
    ("state on the device, weights on the drive", "backward", "fp32", "8bit", 1, "on", 1000),
]


def words_of(dtype: str, moments: str, accumulate: int, checkpointing: str, limit: int) -> list[str]:
    return [
        *("--dtype", dtype, "--accumulate", str(accumulate), f"optim.moment_dtype={moments}"),
        *(f"model.activation_checkpointing={checkpointing}", f"optim.max_grad_norm={limit}"),
    ]


@cache
def expected(model: Path, *setting: str | int) -> tuple[list[Step], dict[str, torch.Tensor]]:
    words = words_of(*setting)  # type: ignore[arg-type]
    reference = REFERENCE if "optim.moment_dtype=fp32" in words else ("--ram-fraction", "1", "tiered.overlap=off")
    with engine(model, *reference, *words) as plain:
        return train(plain, batches(STEPS * int(setting[2])), accumulate=int(setting[2])), masters(plain)


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_placement_and_schedule_change_no_bit(case: Case, folder: Path, drive: Path) -> None:
    home, schedule, *setting = case
    model = model_directory(folder / "gpt2", "gpt2", n_layer=3, **DROPOUT)
    steps, weights = expected(model, *setting)
    words = [*HOMES[home], f"tiered.overlap={schedule}", *words_of(*setting)]  # type: ignore[arg-type]
    with engine(model, *words, drives=[drive]) as ours:
        assert train(ours, batches(STEPS * case[4]), accumulate=case[4]) == steps
        assert_same(masters(ours), weights)


def test_every_pair_occurs() -> None:
    columns = [sorted(set(column), key=str) for column in zip(*CASES, strict=True)]
    for one, other in combinations(range(len(columns)), 2):
        assert {(case[one], case[other]) for case in CASES} == set(product(columns[one], columns[other]))
