"""Tests of importing loss scales: a run in fp16 goes on with the scales that torch's scaler has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import model_directory
from imported_state import imported
from synthetic_foreign import State, random_state, write_trainer
from transformers import AutoModelForCausalLM
from uneven_targets import random_weights

from offload_trainer.errors import UserError
from offload_trainer.optim.loss_scale import LossScale
from offload_trainer.optim.state_files import read_engine_state
from offload_trainer.plan.tiered.state_formats import ADAMW
from offload_trainer.run.commands.import_checkpoint import Imported

WINDOW = 5
# Whether each step overflows. The import comes after each number of steps in MOMENTS.
OVERFLOWS = [step in (2, 3, 19, 26) for step in range(40)]
MOMENTS = [0, 3, 9, 27]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    folder = tmp_path_factory.mktemp("scale")
    model = random_weights(model_directory(folder / "model", "qwen3", tied=False))
    named = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters()
    return model, random_state({name: p.detach() for name, p in named})


def scales_from(done: Imported, moment: int) -> list[float]:
    """Return the scale of each step after `moment` in a run that resumes from the import."""
    scale = LossScale.initial("fp16").resumed(read_engine_state(done.checkpoint, rule=ADAMW).loss_scale)
    found = []
    for overflow in OVERFLOWS[moment:]:
        found.append(scale.value)
        scale = scale.after_step(finite=not overflow)
    return found


def step_of_torch(scaler: Any, *, overflow: bool) -> float:
    """Run one step of torch's scaler; return its scale in this step."""
    weight = torch.nn.Parameter(torch.ones(1))
    adam = torch.optim.SGD([weight], lr=0.1)
    scale: float = scaler.get_scale()
    scaler.scale(weight.sum()).backward()
    assert weight.grad is not None
    if overflow:
        weight.grad.fill_(torch.inf)
    scaler.step(adam)
    scaler.update()
    return scale


@pytest.mark.parametrize("moment", MOMENTS)
def test_scales_are_torchs(moment: int, source: tuple[Path, State], tmp_path: Path) -> None:
    model, state = source
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=WINDOW)
    for overflow in OVERFLOWS[:moment]:
        step_of_torch(scaler, overflow=overflow)
    scaler.scale(torch.ones(1))  # makes the counters that an untouched scaler does not have
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    write_trainer(checkpoint, state)
    torch.save(scaler.state_dict(), checkpoint / "scaler.pt")
    expected = [step_of_torch(scaler, overflow=overflow) for overflow in OVERFLOWS[moment:]]
    notes: list[str] = []
    done = imported(checkpoint, tmp_path / "run", "--model", str(model), "--dtype", "fp16", notes=notes)
    assert scales_from(done, moment) == expected
    assert len(set(expected)) > 2
    assert any(f"the loss scale goes on at {expected[0]:g}" in note for note in notes)


@pytest.mark.slow
def test_what_differs_is_said_and_what_is_impossible_refused(source: tuple[Path, State], tmp_path: Path) -> None:
    model, state = source
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    write_trainer(checkpoint, state)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def notes_of(name: str, dtype: str, **changes: float) -> str:
        torch.save(scaler.state_dict() | changes if name != "disabled" else {}, checkpoint / "scaler.pt")
        notes: list[str] = []
        imported(checkpoint, tmp_path / f"run {name}", "--model", str(model), "--dtype", dtype, notes=notes)
        return "\n".join(notes)

    assert "there it changes by factors of 1.5 and 0.5, and here" in notes_of("1.5", "fp16", growth_factor=1.5)
    assert "there it changes" not in notes_of("2", "fp16")
    assert "has a loss scale of 1024, which only a run with --dtype fp16 uses" in notes_of("bf16", "bf16")
    assert "has no loss scale: the run begins with 65536" in notes_of("disabled", "fp16")
    with pytest.raises(UserError, match=r"scaler\.pt has no loss scale to go on with: scale should .* and is inf"):
        notes_of("inf", "fp16", scale=float("inf"))
    with pytest.raises(UserError, match=r"scaler\.pt has no loss scale to go on with: growth_interval"):
        notes_of("interval", "fp16", growth_interval=0)
