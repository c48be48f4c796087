"""Tests that a resumed run keeps the plan's choices that affect its bits, although more memory is free."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import TINY, Run, faulty
from sample_plans import least_ram

from offload_trainer.plan.plan import Plan
from offload_trainer.run import planning
from offload_trainer.run.planning import plan_run
from offload_trainer.settings import load_config

pytestmark = pytest.mark.slow

STORED = "model.activation_checkpointing=off"  # auto would checkpoint blocks before it divides MLPs
ALWAYS = ["model.overrides.n_inner=8192", "--engine", "tiered", "--save-every", "2", "train.eval_every=0"]
PIECES = [*TINY, *ALWAYS, STORED, "--micro-batch", "16", "--steps", "4"]


def run(ram: int, *words: object, output: Path) -> Run:
    """Run with `ram` bytes of RAM, as the plan sees them."""
    made = faulty("none", *words, output=output, RAM=str(ram))
    assert made.code == 0, made.text[-4000:]
    return made


def planned(*words: str, output: Path, ram: int = 10**12) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        here = planning.machine_here
        patch.setattr(planning, "machine_here", lambda *given, **more: replace(here(*given, **more), ram_bytes=ram))
        return plan_run(load_config([*words, "--output", str(output)])).plan


def needs(*words: str, output: Path) -> int:
    return least_ram(planned(*words, output=output))


def chosen(output: Path) -> dict:
    return json.loads((output / "plan.json").read_text())["chosen"]


def test_a_run_resumes_with_its_mlp_chunks(tmp_path: Path) -> None:
    """A resumed run keeps its MLP chunks and its bits.

    A different choice, by the user or for lack of memory, is reported.
    """
    sizes = [needs(*PIECES, f"model.mlp_chunk={chunk}", output=tmp_path) for chunk in ("off", 256)]
    assert sizes[0] - sizes[1] > 10**7
    between, ample = sum(sizes) // 2, 4 * sizes[0]
    whole = run(between, *PIECES, output=tmp_path / "small")
    assert chosen(whole.output)["mlp_chunk"] == 256
    saved = whole.output / "checkpoints/step-00000002"
    later = run(ample, *PIECES, "--resume", saved, output=tmp_path / "later")
    assert chosen(later.output)["mlp_chunk"] == 256
    assert later.losses == whole.losses[2:]
    assert "was saved with" not in later.text
    asked = run(ample, *PIECES, "model.mlp_chunk=off", "--resume", saved, output=tmp_path / "asked")
    assert "note: model.mlp_chunk is off; step-00000002 was saved with 256" in asked.text
    saved = asked.output / "checkpoints/step-00000004"
    assert planned(*PIECES, "--steps", "6", "--resume", str(saved), output=tmp_path / "x", ram=ample).mlp_chunk == 0
    less = run(between, *PIECES, "--steps", "6", "--resume", saved, output=tmp_path / "less")
    assert chosen(less.output)["mlp_chunk"] == 256
    assert "note: model.mlp_chunk is 256; step-00000004 was saved with off" in less.text
