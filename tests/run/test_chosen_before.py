"""Tests that a resumed run keeps the plan's choices that affect its bits, although more memory is free."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import TINY, faulty
from sample_plans import least_ram

from offload_trainer.plan.plan import Plan
from offload_trainer.run import planning
from offload_trainer.run.planning import plan_run
from offload_trainer.settings import load_config

# auto would checkpoint blocks before it divides MLPs
WORDS = ["model.activation_checkpointing=off", "model.overrides.n_inner=8192", "--engine", "tiered", "--steps", "2"]
PIECES = [*TINY, *WORDS, "--micro-batch", "16", "--save-every", "2", "train.eval_every=0"]


def planned(*words: str, output: Path, ram: int = 10**12) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        here = planning.machine_here
        patch.setattr(planning, "machine_here", lambda *given, **more: replace(here(*given, **more), ram_bytes=ram))
        return plan_run(load_config([*words, "--output", str(output)])).plan


@pytest.mark.slow
def test_a_run_resumes_with_its_mlp_chunks(tmp_path: Path) -> None:
    """The user may choose otherwise, and lack of memory may force it."""
    sizes = [least_ram(planned(*PIECES, f"model.mlp_chunk={chunk}", output=tmp_path)) for chunk in ("off", 256)]
    assert sizes[0] - sizes[1] > 10**7
    between, ample = sum(sizes) // 2, 4 * sizes[0]
    made = faulty("none", *PIECES, output=tmp_path / "small", RAM=str(between))
    assert made.code == 0, made.text[-4000:]
    assert json.loads((made.output / "plan.json").read_text())["chosen"]["mlp_chunk"] == 256
    resumed = [*PIECES, "--steps", "4", "--resume", str(made.output / "checkpoints/step-00000002")]
    assert planned(*resumed, output=tmp_path / "later", ram=ample).mlp_chunk == 256
    assert planned(*resumed, "model.mlp_chunk=off", output=tmp_path / "asked", ram=ample).mlp_chunk == 0
