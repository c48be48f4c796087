"""Train PEFT's adapters in a user's loop, over a model in memory or over an offloaded one."""

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


def adapted(model: Any, **changes: Any) -> PeftModel:
    torch.manual_seed(7)
    words: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return get_peft_model(model, LoraConfig(**(words | {"task_type": "CAUSAL_LM"} | changes)))


def with_norms(model: PeftModel) -> PeftModel:
    """Make the base model's norms trainable too."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)
    return model


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=STEPS + 1)


def trained(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    *,
    clip: Callable[[float], torch.Tensor],
    session: ot.Session | None = None,
    start: int = 0,
    steps: int = STEPS,
) -> Iterator[tuple[float, float]]:
    """Run the loop that both sides share; yield loss and norm of each step."""
    data = [{key: value[None] for key, value in row.items()} for row in rows(STEPS * ACCUMULATE)]
    model.train()
    for step in range(start, steps):
        torch.manual_seed(step)  # dropout draws from it
        total = 0.0
        for number in range(ACCUMULATE):
            last = number == ACCUMULATE - 1
            with nullcontext() if session is None else session.micro_batch(last=last):
                loss = model(**data[step * ACCUMULATE + number]).loss / ACCUMULATE
                loss.backward()
            total += loss.item()
        norm = clip(0.2)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield total, float(norm)


def by_peft(model: PeftModel, *, steps: int = STEPS) -> list[tuple[float, float]]:
    """Train plain PEFT with torch; return losses and norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    clip = lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=False)  # noqa: E731
    return list(trained(model, optimizer, one_cycle(optimizer), clip=clip, steps=steps))


def adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
