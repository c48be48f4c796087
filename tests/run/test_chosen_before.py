"""Tests that a resumed run keeps the plan's choices that affect its bits, although other choices would fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import TINY, call

from offload_trainer.run.planning import plan_run
from offload_trainer.settings import load_config

# auto would checkpoint blocks before it divides MLPs
WORDS = ["model.activation_checkpointing=off", "model.overrides.n_inner=8192", "--engine", "tiered"]
PIECES = [*TINY, *WORDS, "--micro-batch", "16", "--save-every", "2", "train.eval_every=0"]


@pytest.mark.slow
def test_a_run_resumes_with_its_mlp_chunks(tmp_path: Path) -> None:
    """The user may choose otherwise."""
    saved = call(*PIECES, "--steps", "2", "model.mlp_chunk=256", output=tmp_path / "run").output

    def chunk(*words: str) -> int:
        return plan_run(load_config([*PIECES, *words, "--output", str(tmp_path / "later")])).plan.mlp_chunk

    resumed = ["--steps", "4", "--resume", str(saved / "checkpoints/step-00000002")]
    assert chunk() == 0
    assert chunk(*resumed) == 256
    assert chunk(*resumed, "model.mlp_chunk=off") == 0
