"""Train in a user's loop, over a model in memory or over an offloaded one, with PEFT's adapters or without."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from engine_bench import VOCABULARY
from hf_trainers import rows
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

import offload_trainer as ot

STEPS, ACCUMULATE = 10, 3
# Keywords of a session for each placement.
HOMES: dict[str, dict[str, Any]] = {
    "resident": {"params": "gpu"},
    "in RAM": {"params": "cpu", "weight_buffers": 2},
    "on the drive": {"params": "nvme", "optimizer": "nvme", "gradients": "nvme", "weight_buffers": 2},
}
ROWS = [{key: value[None] for key, value in row.items()} for row in rows(STEPS * ACCUMULATE)]


class Tower(nn.Module):
    """A model outside transformers, with a weight that is used without calling its module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY + 13, 32)
        self.floors = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.ones(32))
        self.head = nn.Linear(32, VOCABULARY + 13, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for floor in self.floors:
            x = x + floor(x)
        return functional.linear(x * self.scale, self.head.weight)


class Spare(Tower):
    """A model whose last module is used in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(VOCABULARY + 13, VOCABULARY + 13)
        self.calls = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found = super().forward(input_ids)
        return found + self.spare(found) if self.calls % 2 else found


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    found = model(input_ids=batch.inputs)
    return functional.cross_entropy(getattr(found, "logits", found).flatten(0, 1), batch.targets.flatten())


def of_rows(model: Any, number: int) -> torch.Tensor:
    return model(**ROWS[number]).loss


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    """Return a schedule that changes the rate and the first beta of each of at most two groups separately."""
    rates = [2e-2, 5e-3][: len(optimizer.param_groups)]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=STEPS + 1)


def trained(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    loss_at: Callable[[Any, int], torch.Tensor] = of_rows,  # the loss of the micro-batch of a number
    *,
    session: ot.Session | None = None,
    start: int = 0,
    steps: int = STEPS,
) -> Iterator[tuple[float, float, list[float]]]:
    """Run the loop that both sides share, without a session in plain torch; yield (loss, norm, rates) of each step."""
    for step in range(start, steps):
        torch.manual_seed(step)  # dropout draws from it
        losses = []
        for number in range(ACCUMULATE):
            with nullcontext() if session is None else session.micro_batch(last=number == ACCUMULATE - 1):
                loss = loss_at(model, step * ACCUMULATE + number)
                losses.append(loss.detach())
                (loss / ACCUMULATE).backward()
        norm = session.clip_grad_norm_(0.2) if session else clipped(model, 0.2)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield float(sum(losses)), float(norm), [group["lr"] for group in optimizer.param_groups]


def opened(folder: Path, drive: Path, base: str = "model", *, home: str = "on the drive", **keys: Any) -> ot.Session:
    """Load a model for `rows`, with all weights frozen unless `freeze` is given."""
    words: dict[str, Any] = {"dtype": "fp32", "freeze": ["."], "page_size": 8192, "seq_len": 24, "say": lambda _: None}
    return ot.load(folder, nvme=drive, base=base, **(words | HOMES[home] | keys))


def clipped(model: nn.Module, limit: float) -> torch.Tensor:
    """Clip gradients as the session does; return their norm."""
    return nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=False)


def by_torch(
    model: nn.Module,
    loss_at: Callable[[Any, int], torch.Tensor] = of_rows,
    *,
    parameters: Any = None,
    steps: int = STEPS,
) -> list[tuple[float, float, list[float]]]:
    optimizer = torch.optim.AdamW(parameters or model.parameters(), lr=1e-2, fused=True)
    return list(trained(model, optimizer, one_cycle(optimizer), loss_at, steps=steps))


def adapted(model: Any, **changes: Any) -> PeftModel:
    torch.manual_seed(7)
    words: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return get_peft_model(model, LoraConfig(**(words | {"task_type": "CAUSAL_LM"} | changes))).train()


def plain(folder: Path, base: str = "model") -> Any:
    """Return the model in memory, the matrices of its blocks rounded to `base`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if base != "model" and name.endswith("proj.weight"):
            parameter.data = rounded(parameter, base)
    return model


def rounded(weight: torch.Tensor, base: str) -> torch.Tensor:
    """Return a weight as bitsandbytes rounds it, with its own fp32 scales."""
    from bitsandbytes import functional as bits

    values = weight.detach().flatten().to(torch.bfloat16)
    values = functional.pad(values, (0, -values.numel() % 256))
    if base == "nf4":
        codes, state = bits.quantize_4bit(values, blocksize=64, quant_type="nf4")
        read = bits.dequantize_4bit
    else:
        table = torch.tensor([max(k, -127) / 127 for k in range(-128, 128)])
        codes, state = bits.quantize_blockwise(values, code=table, blocksize=256)
        read = bits.dequantize_blockwise
    state.dtype = torch.float32
    return read(codes, state).flatten()[: weight.numel()].view(weight.shape)
