"""Tests of `export --trainer`: transformers' Trainer resumes from it with the run's state and its next losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ask
from engine_bench import VOCABULARY, engine, model_directory, train
from imported_state import assert_same_state, imported, state_of
from synthetic_checkpoints import saved_engine
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from uneven_targets import random_weights

from offload_trainer.data.rows import Batch, DataState

LENGTH, LR, HALF, STEPS = 24, 1e-2, 3, 6
WORDS = ["--dtype", "fp32", "optim.max_grad_norm=0.5", "optim.schedule=constant", "optim.warmup_steps=0"]
WORDS += ["--steps", str(STEPS)]
FORMATS: dict[str, list[str]] = {"plain": ["--engine", "plain"], "tiered": ["--ram-fraction", "1"]}
FORMATS |= {"bf16 moments": ["--ram-fraction", "1", "optim.moment_dtype=bf16"]}


class Recording(Trainer):
    """A Trainer that keeps the loss of each micro-batch."""

    losses: list[float]

    def training_step(self, *args: Any, **words: Any) -> torch.Tensor:
        loss = super().training_step(*args, **words)
        self.losses.append(float(loss))
        return loss


def row() -> torch.Tensor:
    tokens = [7]
    for _ in range(LENGTH):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return torch.tensor(tokens)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_trainer_resumes_from_it(name: str, format: str, tmp_path: Path) -> None:
    """A Trainer that resumes after step 3 has the losses of the run's steps 4 to 6, and so has an import of it."""
    model = random_weights(model_directory(tmp_path / "model", name, tied=name == "gpt2"))
    batch = Batch(row()[:-1].expand(2, -1), row()[1:].expand(2, -1), state=DataState(0), seed=0)
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
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    labels = row()
    labels[0] = -100  # a Trainer counts it as a target for some models, although no token is before it
    rows = [{"input_ids": row(), "labels": labels} for _ in range(4)]
    fresh = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = Recording(fresh, arguments, train_dataset=rows)
    trainer.losses = []
    trainer.train(resume_from_checkpoint=str(tmp_path / "out"))
    tolerance = 1e-3 if format == "bf16 moments" else 1e-6  # bf16 moments are rounded after each step
    assert trainer.losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert trainer.state.global_step == STEPS


def test_checkpoints_that_no_trainer_reads_are_refused(tmp_path: Path) -> None:
    for words in (["out.gguf"], ["out", "--dtype", "bf16"], ["out", "--mixed"]):
        done = ask("export", tmp_path, *words, "--trainer")
        assert done.returncode == 2
        assert "--trainer writes a checkpoint in fp32 to a directory" in done.stderr
    done = ask("export", tmp_path, tmp_path / "out", "--trainer")
    assert done.returncode == 2
    assert "neither a checkpoint" in done.stderr
