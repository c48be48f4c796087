"""Plain torch, the reference: what a GPU asks of it that a CPU does not."""

from __future__ import annotations

from pathlib import Path

import torch
from bench_of_engines import batches, engine, model_directory, train


def test_counts_of_steps_go_where_the_update_is(tmp_path: Path) -> None:
    """CUDA's fused AdamW refuses a count in host memory after a resume (pytorch #103256)."""
    model = model_directory(tmp_path / "model", "gpt2")
    with engine(model, "--engine", "plain") as first:
        train(first, batches(2))
        saved = tmp_path / "saved"
        saved.mkdir()
        first.snapshot().write(saved)
        expected = train(first, batches(3))[-1]
    with engine(model, "--engine", "plain") as second:
        second.load(saved)
        assert train(second, batches(3))[-1] == expected  # and still the same bits on a CPU
    with engine(model, "--engine", "plain") as elsewhere:
        elsewhere._device = torch.device("meta")
        elsewhere.load(saved)
        states = elsewhere._adam.state.values()
        assert states
        assert {tensor.device.type for state in states for tensor in state.values()} == {"meta"}
