"""Train with micro-batches that count different numbers of targets, on transformers with torch alone as a reference."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offload_trainer.data.rows import IGNORED, Batch

LR, DECAY, EPS = 1e-2, 0.1, 1e-3
COUNTS = (3, 0, 25)  # Targets of each micro-batch in a cycle of three.


def random_weights(folder: Path) -> Path:
    """Write random fp32 weights into a directory that has a configuration."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).save_pretrained(folder)
    return folder


def masked(data: list[Batch]) -> list[Batch]:
    """Mask targets so that the batches count `COUNTS` targets each, at random places, never a row's last one."""
    random, made = torch.Generator().manual_seed(7), []
    for number, batch in enumerate(data):
        places = batch.targets[:, :-1].numel()
        chosen = torch.zeros(places, dtype=torch.bool)
        chosen[torch.randperm(places, generator=random)[: COUNTS[number % len(COUNTS)]]] = True
        keep = torch.nn.functional.pad(chosen.view(len(batch.targets), -1), (0, 1), value=False)
        made.append(replace(batch, targets=batch.targets.where(keep, IGNORED)))
    return made


def transformers_alone(
    folder: Path, data: list[Batch], *, at_a_time: int
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Return steps (loss, norm) and weights of transformers' own loss, with `at_a_time` micro-batches in one batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    steps = []
    for start in range(0, len(data), at_a_time):
        rows = data[start : start + at_a_time]
        inputs, targets = (torch.cat([getattr(batch, name) for batch in rows]) for name in ("inputs", "targets"))
        labels = torch.nn.functional.pad(targets[:, :-1], (1, 0), value=IGNORED)
        loss = model(input_ids=inputs, labels=labels, use_cache=False).loss
        loss.backward()
        steps.append((float(loss.detach()), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))))
        adam.step()
        adam.zero_grad()
    return steps, {name: p.detach() for name, p in model.named_parameters()}
