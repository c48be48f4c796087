"""Tests of ranks that compute one model together (parallel.pipeline): they have the bits of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_bench import DROPOUT, model_directory
from forked_ranks import Case, Result, run_ranks
from placements import ALL_ON_DRIVES, BEHIND, IN_LINE

pytestmark = pytest.mark.usefixtures("nothing_is_small")

HALF = ("--optimizer", "nvme", "--ram-fraction", "0.5")
CLIP = "optim.max_grad_norm=0.3"
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {  # model, micro-batches of a step, words
    "weights in RAM": ("gpt2", 2, ("--params", "cpu", CLIP, BEHIND)),
    "weights in place": ("llama", 5, ("--params", "gpu", *HALF, IN_LINE)),
    "all on the drive": ("gpt2", 5, (*ALL_ON_DRIVES, "tiered.state_copies=2", BEHIND)),
    "one micro-batch": ("gpt2", 1, ("--params", "cpu", "--dtype", "fp32", *HALF, CLIP)),
    "one micro-batch, untied": ("llama", 1, (*ALL_ON_DRIVES, BEHIND)),
    "many micro-batches": ("qwen3", 8, ("--params", "cpu", "--dtype", "fp32", CLIP, "tiered.weight_buffers=1")),
    "experts": ("mixtral", 5, ("--params", "cpu", *HALF, BEHIND)),
    "experts on the drive": ("mixtral", 2, (*ALL_ON_DRIVES, "--dtype", "fp32")),
    "overflows": ("gpt2", 2, ("--params", "cpu", "--dtype", "fp16", CLIP)),
    "inputs away": ("llama", 2, ("--params", "nvme", "model.offload_activations=nvme", "tiered.weight_buffers=2")),
    "Muon": ("qwen3", 2, ("--params", "cpu", *HALF, "optim.name=muon", "--dtype", "fp32")),
    "small state": ("gpt2", 2, ("--params", "cpu", *HALF, "optim.moment_dtype=8bit", "optim.master_dtype=bf16")),
    "sums in 16 bits": ("llama", 5, ("--params", "cpu", "optim.accumulate_dtype=model", "model.mlp_chunk=8")),
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": DROPOUT,  # tied
    "llama": {"tied": False, "attention_dropout": 0.1},
    "qwen3": {},
    "mixtral": {"tied": False, "num_hidden_layers": 4},
}


def cases(folder: Path, out: Path, *, ranks: int, names: tuple[str, ...]) -> list[Case]:
    """Return cases whose micro-batches have different numbers of targets; one rank computes in its usual order."""
    pipeline = (f"parallel.pipeline={ranks}",) if ranks > 1 else ()
    found = []
    for name in names:
        kind, micro, words = CASES[name]
        model = model_directory(folder / kind, kind, **MODELS[kind])
        if ranks == 1 and "offload" in str(words):
            words = (*words, "model.activation_checkpointing=on")
        given = (*words, *pipeline, "--accumulate", str(micro))
        shared: dict[str, Any] = {"steps": 3, "micro": micro, "unequal": micro > 1, "drives": (folder / "drive",)}
        found.append(Case(model, given, out / name, **shared))
    return found


def results(folder: Path, out: Path, *, ranks: int, names: tuple[str, ...]) -> list[list[Result]]:
    return run_ranks(cases(folder, out, ranks=ranks, names=names), count=ranks, folder=out / "ranks")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[Result]]:
    return dict(zip(CASES, results(folder, folder / "alone", ranks=1, names=tuple(CASES)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_have_the_bits_of_one(ranks: int, alone: Any, folder: Path, tmp_path: Path) -> None:
    """Losses, norms, masters and saved states match; micro-batches, placements and models differ."""
    for name, found in zip(CASES, results(folder, tmp_path, ranks=ranks, names=tuple(CASES)), strict=True):
        assert found == alone[name] * ranks, name
