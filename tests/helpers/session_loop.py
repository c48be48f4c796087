"""Train in a user's loop, over a model in memory or over an offloaded one, with PEFT's adapters or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from hf_trainers import rows
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import offload_trainer as ot

STEPS, ACCUMULATE = 10, 3
# Keywords of a session for each placement.
HOMES: dict[str, dict[str, Any]] = {
    "resident": {"params": "gpu"},
    "in RAM": {"params": "cpu", "weight_buffers": 2},
    "on the drive": {"params": "nvme", "optimizer": "nvme", "gradients": "nvme", "weight_buffers": 2},
}
ALL_BUT_NORMS = [r"^(?!.*norm)"]
ROWS = [{key: value[None] for key, value in row.items()} for row in rows(STEPS * ACCUMULATE)]


def of_rows(model: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(**ROWS[number]).loss
    return loss


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    """Return a schedule that changes the rate and the first beta of each of at most two groups separately."""
    rates = [2e-2, 5e-3][: len(optimizer.param_groups)]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=STEPS + 1)


def trained(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    loss_of: Callable[[Any, int], torch.Tensor] = of_rows,
    *,
    session: ot.Session | None = None,
    start: int = 0,
    steps: int = STEPS,
) -> Iterator[tuple[float, float, list[float]]]:
    """Run the loop that both sides share, without a session in plain torch; yield (loss, norm, rates) of each step.

    `loss_of` returns the loss of the micro-batch of a number.
    """
    for step in range(start, steps):
        torch.manual_seed(step)  # dropout draws from it
        losses = []
        for number in range(ACCUMULATE):
            with nullcontext() if session is None else session.micro_batch(last=number == ACCUMULATE - 1):
                loss = loss_of(model, step * ACCUMULATE + number)
                losses.append(loss.detach())
                (loss / ACCUMULATE).backward()
        norm = session.clip_grad_norm_(0.2) if session else clipped(model, 0.2)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield float(sum(losses)), float(norm), [group["lr"] for group in optimizer.param_groups]


def clipped(model: nn.Module, limit: float) -> torch.Tensor:
    """Clip gradients as the session does; return their norm."""
    return nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=False)


def by_torch(
    model: nn.Module,
    loss_of: Callable[[Any, int], torch.Tensor] = of_rows,
    *,
    parameters: Any = None,
    steps: int = STEPS,
) -> list[tuple[float, float, list[float]]]:
    optimizer = torch.optim.AdamW(parameters or model.parameters(), lr=1e-2, fused=True)
    return list(trained(model, optimizer, one_cycle(optimizer), loss_of, steps=steps))


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapted(model: Any, **changes: Any) -> PeftModel:
    torch.manual_seed(7)
    words: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return get_peft_model(model, LoraConfig(**(words | {"task_type": "CAUSAL_LM"} | changes))).train()


def with_norms(model: PeftModel) -> PeftModel:
    """Make the base model's norms trainable too."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)
    return model


def adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
