"""Steps whose micro-batches count different numbers of targets: one mean over all of them, as transformers has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_of_engines import batches, engine, masters, model_directory, train
from transformers import AutoConfig, AutoModelForCausalLM

from offload_trainer.config import ModelSection
from offload_trainer.data.rows import IGNORED, Batch, weights_in_step
from offload_trainer.errors import TrainerError
from offload_trainer.model.source import resolve_model

LR, DECAY = 1e-2, 0.1
COUNTS = (3, 0, 25)  # of the three micro-batches of a step


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = model_directory(tmp_path_factory.mktemp("model"), "qwen3", tied=False)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).save_pretrained(folder)
    return folder


def masked(data: list[Batch]) -> list[Batch]:
    """Each counts so many targets, at places drawn at random, and never a row's last, which has no next token."""
    random, made = torch.Generator().manual_seed(7), []
    for number, batch in enumerate(data):
        places = batch.targets[:, :-1].numel()
        chosen = torch.zeros(places, dtype=torch.bool)
        chosen[torch.randperm(places, generator=random)[: COUNTS[number % 3]]] = True
        keep = torch.nn.functional.pad(chosen.view(len(batch.targets), -1), (0, 1), value=False)
        made.append(replace(batch, targets=batch.targets.where(keep, IGNORED)))
    return made


def transformers_alone(folder: Path, data: list[Batch]) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and weights where a step's micro-batches are one batch, and the loss is transformers'."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-3)
    losses, norms = [], []
    for start in range(0, len(data), 3):
        inputs, targets = (torch.cat([getattr(b, n) for b in data[start : start + 3]]) for n in ("inputs", "targets"))
        labels = torch.nn.functional.pad(targets[:, :-1], (1, 0), value=IGNORED)
        loss = model(input_ids=inputs, labels=labels, use_cache=False).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(float(loss.detach()))
        adam.step()
        adam.zero_grad()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("words", [("--engine", "plain"), ("--ram-fraction", "1", "model.loss_chunk=10")], ids=str)
def test_the_mean_is_over_all_targets_of_a_step(words: tuple[str, ...], pretrained: Path) -> None:
    data = masked(batches(9))
    losses, norms, weights = transformers_alone(pretrained, data)
    always = ("model.scratch=false", "--dtype", "fp32", "--accumulate", "3", "optim.eps=1e-3")
    with engine(pretrained, *always, *words) as ours:
        steps = train(ours, data, accumulate=3)
        for (loss, norm), expected, length in zip(steps, losses, norms, strict=True):
            assert loss == pytest.approx(expected, rel=1e-6)
            assert norm == pytest.approx(length, rel=1e-5)
        for name, master in masters(ours).items():
            torch.testing.assert_close(master, weights[name], rtol=1e-5, atol=1e-6)
        assert ours.eval_loss(data[1]) == 0.0


def test_equal_counts_have_weights_of_exactly_one() -> None:
    for count in (1, 3, 48, 1023, 4096):
        for batches_of_a_step in (1, 2, 3, 5, 7, 64):
            assert weights_in_step([count] * batches_of_a_step) == [1.0] * batches_of_a_step
    assert weights_in_step([3, 0, 9]) == [0.75, 0.0, 2.25]


def test_a_step_that_counts_nothing_is_refused(pretrained: Path) -> None:
    with pytest.raises(TrainerError, match="a step of 2 micro-batches counts no target in the loss: all are -100"):
        weights_in_step([0, 0])


def test_targets_are_counted_where_the_caller_does_not(pretrained: Path) -> None:
    source = resolve_model(ModelSection(name=str(pretrained), dtype="fp32"), seed=0)
    ours = source.build(dtype=torch.float32)
    batch = masked(batches(1))[0]
    with torch.no_grad():
        for name, value in source.weights():
            ours.model.get_parameter(name).copy_(value)
        assert torch.equal(ours(batch.inputs, batch.targets), ours(batch.inputs, batch.targets, None, batch.counted))
