"""Tests that a resumed run keeps the plan's choices that affect its bits, although other choices would fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import TINY, call

from offload_trainer.run.planning import MemoryFallbacks, _with_resumed_choices, model_of, plan_run
from offload_trainer.settings import load_config

# auto would checkpoint blocks before it divides MLPs
WORDS = ["model.activation_checkpointing=off", "model.overrides.n_inner=8192", "--engine", "tiered"]
PIECES = [*TINY, *WORDS, "--micro-batch", "16", "--save-every", "2", "train.eval_every=0"]


def test_choices_that_change_bits_are_kept_unless_the_user_chooses() -> None:
    """On a CPU the bits do not depend on the number of checkpointed blocks, so the plan chooses it again."""
    words = [*TINY, "model.overrides.n_inner=8192", "tiered.fetch_granularity=block"]
    models = MemoryFallbacks(lambda: model_of(load_config(words)))

    def resumed(key: str, before: int | str, *more: str, on_gpu: bool = True) -> int | str:
        kept = _with_resumed_choices(load_config([*words, *more]), {"model": {key: before}}, models, on_gpu=on_gpu)
        return getattr(kept.model, key)

    for chunk in (256, "off"):
        assert resumed("mlp_chunk", chunk) == chunk
    assert resumed("mlp_chunk", 256, "model.mlp_chunk=off") == "off"
    for count in (1, "on", "off"):
        assert resumed("activation_checkpointing", count) == count
        assert resumed("activation_checkpointing", count, on_gpu=False) == "auto"
    assert resumed("activation_checkpointing", "on", "model.activation_checkpointing=1") == 1
    # Nothing could be offloaded with the number of the run before.
    assert resumed("activation_checkpointing", "off", "model.offload_activations=cpu") == "auto"


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
