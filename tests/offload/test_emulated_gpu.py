"""Tests of the GPU path on an emulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_gpu import GPU, emulated_gpu
from engine_bench import assert_same, batches, engine, masters, model_directory, train

HOMES = {
    "resident": ["--params", "gpu"],
    "in RAM": ["--params", "cpu", "tiered.weight_buffers=2"],
    "on the drive": ["--params", "nvme", "placement.gradients=nvme", "--optimizer", "nvme", "tiered.weight_buffers=2"],
}
pytestmark = pytest.mark.usefixtures("nothing_is_small")


@pytest.mark.parametrize("home", HOMES)
def test_it(home: str, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_directory(tmp_path / "gpt2", "gpt2")
    words, data = [*HOMES[home], "--accumulate", "3"], batches(12)
    with engine(model, "--engine", "plain", "--accumulate", "3") as reference:
        expected, weights = train(reference, data, accumulate=3), masters(reference)
    with emulated_gpu(monkeypatch, haste=0.2) as gpu:
        with engine(model, *words, drives=[drive], device=gpu.device(staging_bytes=1 << 20, stagings=2)) as ours:
            assert train(ours, data, accumulate=3) == expected
            found = masters(ours)
    assert_same(found, weights)
    assert not gpu.bare
    assert not gpu.elsewhere
    assert not gpu.freed
    print(gpu.host_waits)
