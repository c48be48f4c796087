"""Tests of `export --trainer`: transformers' Trainer resumes from it with the run's state and its next losses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ask
from engine_bench import engine, model_directory, train
from imported_state import Recording, assert_same_state, imported, same_batch, same_rows, state_of
from safetensors import safe_open
from synthetic_checkpoints import saved_engine
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)
from uneven_targets import random_weights

from offload_trainer.errors import UserError
from offload_trainer.run.commands.export_trainer import export_trainer
from offload_trainer.settings import load_config
from offload_trainer.trainer import learning_rate

pytestmark = pytest.mark.slow

LR, HALF, STEPS = 1e-2, 3, 6
WORDS = ["--dtype", "fp32", "optim.max_grad_norm=0.5", "optim.schedule=constant", "optim.warmup_steps=0"]
WORDS += ["--steps", str(STEPS), "--save-every", "3", "train.eval_every=2"]
FORMATS: dict[str, list[str]] = {"plain": ["--engine", "plain"], "tiered": ["--ram-fraction", "1"]}
FORMATS |= {"bf16 moments": ["--ram-fraction", "1", "optim.moment_dtype=bf16"]}


class OwnIntervals(TrainerCallback):
    """The callback of docs/export.md."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)


# (model, format, callbacks, steps that are logged, evaluated and saved)
@pytest.mark.parametrize(
    ("name", "format", "callbacks", "expected_steps"),
    [
        ("gpt2", "tiered", [], ([4, 5, 6], [4, 6], [6])),  # the run's intervals: 1, 2 and 3
        ("qwen3", "plain", [OwnIntervals, EarlyStoppingCallback], ([4, 6], [4, 5, 6], [4, 6])),
        ("qwen3", "bf16 moments", [EarlyStoppingCallback], ([4, 5, 6], [4, 6], [6])),
    ],
)
def test_a_trainer_resumes_from_it(
    name: str, format: str, callbacks: list[type], expected_steps: tuple[list[int], ...], tmp_path: Path
) -> None:
    """A Trainer that resumes after step 3 has the losses of the run's steps 4 to 6, and so has an import of it.

    It logs, evaluates and saves at the run's intervals, or with the callback at its own, which are 2, 1 and 2.
    """
    model = random_weights(model_directory(tmp_path / "model", name, tied=name == "gpt2"))
    batch = same_batch()
    with engine(model, *WORDS, *FORMATS[format]) as made:
        train(made, [batch] * HALF, lr=LR)
        made.synchronize()
        checkpoint = saved_engine(made, tmp_path / "run", HALF, ["--model", str(model), "--lr", str(LR), *WORDS])
        expected = [loss for loss, _ in train(made, [batch] * (STEPS - HALF), lr=LR)]
    done = ask("export", tmp_path / "run", tmp_path / "out", "--trainer", "--check")
    assert done.returncode == 0, done.stderr
    assert f"exported {checkpoint} in fp32 to {tmp_path / 'out'}" in done.stdout
    again = imported(tmp_path / "out", tmp_path / "again", "--dtype", "fp32")
    if format != "bf16 moments":
        assert_same_state(state_of(again.checkpoint), state_of(checkpoint))
    arguments = TrainingArguments(
        str(tmp_path / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=2,
        metric_for_best_model="loss",
        restore_callback_states_from_checkpoint=True,
        report_to="none",
        disable_tqdm=True,
    )
    fresh = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows, made_callbacks = same_rows(), [kind() for kind in callbacks]
    trainer = Recording(fresh, arguments, train_dataset=rows, eval_dataset=rows, callbacks=made_callbacks)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out"))
    history = trainer.state.log_history
    logged, evaluated = ([entry["step"] for entry in history if key in entry] for key in ("loss", "eval_loss"))
    saved = sorted(int(path.name.rpartition("-")[2]) for path in (tmp_path / "trainer").glob("checkpoint-*"))
    assert (logged, evaluated, saved) == expected_steps
    tolerance = 1e-3 if format == "bf16 moments" else 1e-6  # bf16 moments are rounded after each step
    assert trainer.losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert trainer.state.global_step == STEPS


@pytest.mark.parametrize("delay", [0, 1])
def test_the_schedule_goes_on_where_it_is(delay: int, tmp_path: Path) -> None:
    """transformers' scheduler that loads the exported state has the rates of the run's next steps."""
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    words = ["--lr", str(LR), "--steps", str(STEPS), "optim.schedule=linear", "optim.warmup_steps=2"]
    words += ["optim.final_lr_ratio=0", f"optim.schedule_delay={delay}"]
    with engine(model, "--dtype", "fp32", "--engine", "plain") as made:
        saved_engine(made, tmp_path / "run", HALF, ["--model", str(model), *words])
    done = ask("export", tmp_path / "run", tmp_path / "out", "--trainer")
    assert done.returncode == 0, done.stderr
    groups = torch.load(tmp_path / "out/optimizer.pt")["param_groups"]
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in groups], lr=LR)
    scheduler = get_scheduler("linear", optimizer, 2, STEPS)
    scheduler.load_state_dict(torch.load(tmp_path / "out/scheduler.pt"))
    found = [groups[0]["lr"]]
    for _ in range(HALF + 1, STEPS):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    optim = load_config(words).optim
    assert found == pytest.approx([learning_rate(step, optim, steps=STEPS) for step in range(HALF, STEPS)], rel=1e-9)
    again = imported(tmp_path / "out", tmp_path / "again", *words)
    assert f"optim.schedule_delay={delay}" in again.words


def test_too_small_a_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export counts moments too, which need their room twice while they are written."""
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    with engine(model, "--dtype", "fp32", "--engine", "plain") as made:
        checkpoint = saved_engine(made, tmp_path / "run", HALF, ["--model", str(model), *WORDS])
    with safe_open(checkpoint / "master.safetensors", "pt") as file:
        count = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a dict
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20 * count - 1))
    with pytest.raises(UserError, match=r"the export takes .* and .* are free"):
        export_trainer(tmp_path / "run", tmp_path / "out", shard_bytes=10**9, check=False)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20 * count + (1 << 20)))
    done = export_trainer(tmp_path / "run", tmp_path / "out", shard_bytes=10**9, check=False)
    assert done.bytes >= 12 * count


def test_checkpoints_that_no_trainer_reads_are_refused(tmp_path: Path) -> None:
    done = ask("export", tmp_path, "out", "--dtype", "bf16", "--trainer")
    assert done.returncode == 2
    assert "--trainer writes a checkpoint in fp32: leave out --dtype" in done.stderr
    done = ask("export", tmp_path, tmp_path / "out", "--trainer")
    assert done.returncode == 2
    assert "neither a checkpoint" in done.stderr
