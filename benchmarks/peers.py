"""Other libraries' ways to train with little memory, driven by this package's loop with the same rows, clock and loss.

    native   forward and backward of plain torch, which discards the gradients: the minimum that every engine needs
    plain    torch alone with its fused AdamW on fp32 masters, all on the GPU (tests/helpers/plain_engine.py)
    fsdp2    torch's fully_shard with CPUOffloadPolicy on one rank: fp32 masters, moments and AdamW in host memory
    torchao  CPUOffloadOptimizer: weights on the GPU, AdamW on a copy of them in host memory

Stock DeepSpeed is an engine of the package (`--engine deepspeed`) and needs nothing here. Where it is not installed,
the record leaves it out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SETTINGS = {
    "native": "torch alone; weights and gradients in 16 bit on the GPU, no optimizer",
    "plain": "torch alone; weights in 16 bit, fp32 masters and torch.optim.AdamW(fused=True) on the GPU",
    "torchao": "CPUOffloadOptimizer(parameters, torch.optim.AdamW, fused=True) on weights in bf16: the update is in "
    "bf16 too, without fp32 masters, 6 bytes a parameter in host memory where ours has 12; no clipping, since the "
    "gradients have been copied to host memory by the end of the backward",
    "fsdp2": "fully_shard of each block and of the rest, CPUOffloadPolicy(pin_memory=True), MixedPrecisionPolicy("
    "param_dtype=bf16, reduce_dtype=fp32), torch.optim.AdamW(fused=True) on fp32 CPU parameters, clip_grad_norm_",
}


def builder(peer: str | None) -> Callable[..., Any]:
    """Return the function that builds this peer's engine, or the package's own without a peer."""
    from offload_trainer.run.build import build_engine

    if peer is None:
        return build_engine
    if peer == "native":
        return native_engine
    if peer == "plain":
        sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/helpers"))
        from plain_engine import PlainEngine

        return lambda setup, **_: PlainEngine(setup.source, setup.config.model, setup.config.optim)
    rival = {"fsdp2": fsdp2, "torchao": torchao}[peer]
    return lambda setup, **_: rival(setup.source, setup.config)


def native_engine(setup: Any, **_: Any) -> Any:
    """Build an engine that only runs plain torch's forward and backward, and discards the gradients."""
    import torch

    from offload_trainer.engine.cpu_matmul import use_fp32_products
    from offload_trainer.storage.tensorfile import DTYPES

    dtype = DTYPES[setup.config.model.dtype]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        use_fp32_products(dtype)
    module = _filled(setup.source, dtype).to(device)
    return engine_of(module, device)


def engine_of(
    module: Any,
    device: Any,
    adam: Any = None,
    *,
    clip: float | None = None,
    begin: Callable[[bool], None] = lambda last: None,
    close: Callable[[], None] = lambda: None,
) -> Any:
    """Return an engine with a module's forward and backward and this optimizer's update, if any.

    Without `clip`, gradients are neither measured nor clipped. `begin(last)` is called before each micro-batch. The
    only wait for a GPU is for the losses, once a step.
    """
    import torch

    from offload_trainer.engine.protocol import StepResult

    def update(lr: float) -> Any:
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip) if clip else None
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        adam.zero_grad()
        return norm

    def train_step(batches: Any, *, lr: float, clock: Any) -> StepResult:
        losses, norm = [], None
        for number, batch in enumerate(batches, 1):
            begin(number == len(batches))
            with clock.phase("forward"):
                loss = module(*batch.arguments(device, training=True))
                losses.append(loss.detach())
            with clock.phase("backward"):
                (loss / len(batches)).backward()
        if adam is None:
            module.zero_grad(set_to_none=True)
        else:
            with clock.phase("update"):
                norm = update(lr)
        if norm is not None:
            norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # FSDP2's norm is sharded
        return StepResult(loss=float(torch.stack(losses).mean()), grad_norm=norm, loss_scale=1.0, skipped=False)

    return SimpleNamespace(train_step=train_step, close=close, rank=0, world=1)


def torchao(source: Any, config: Any) -> Any:
    """Build an engine with torchao's CPUOffloadOptimizer over weights on the GPU, as its documentation shows."""
    import torch
    from torchao.optim import CPUOffloadOptimizer

    from offload_trainer.storage.tensorfile import DTYPES

    module = _filled(source, DTYPES[config.model.dtype]).cuda()
    groups, how = _adamw(module, source, config.optim)
    return engine_of(module, torch.device("cuda"), CPUOffloadOptimizer(groups, torch.optim.AdamW, **how))


def fsdp2(source: Any, config: Any) -> Any:
    """Build an engine with FSDP2 on one rank; parameters, gradients and moments are in host memory."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    from offload_trainer.model.shape import block_names
    from offload_trainer.storage.tensorfile import DTYPES

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    for library in ("NCCL", "GLOO"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # the machine may have no other interface
    # gloo reduces the norms of gradients in host memory.
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    module = _filled(source, torch.float32)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[config.model.dtype], reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=True) if on_gpu else OffloadPolicy(),
    }
    for name in block_names(module.model):
        fully_shard(module.model.get_submodule(name), **settings)
    fully_shard(module, **settings)
    groups, how = _adamw(module, source, config.optim)
    return engine_of(
        module,
        device,
        torch.optim.AdamW(groups, **how),
        clip=config.optim.max_grad_norm,
        begin=module.set_requires_gradient_sync,
        close=dist.destroy_process_group,
    )


def _filled(source: Any, dtype: Any) -> Any:
    """Return the module for training, with its weights."""
    from offload_trainer.model.pretrained import as_parameter
    from offload_trainer.plan.planner import checkpointed_blocks

    module = source.build(dtype=dtype, checkpointed=checkpointed_blocks(source.section, source.shape))
    for name, value in source.weights():
        module.model.get_parameter(name).data.copy_(as_parameter(value, dtype))
    return module.train()


def _adamw(module: Any, source: Any, optim: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return AdamW's parameter groups, with weight decay and without, and its other arguments."""
    from offload_trainer.plan.shape import decay_groups

    weights = dict(module.model.named_parameters())
    decayed, plain = decay_groups(source.shape.weights)
    groups = [
        {"params": [weights[weight.name] for weight in some], "weight_decay": decay}
        for some, decay in ((decayed, optim.weight_decay), (plain, 0.0))
        if some
    ]
    return groups, {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "fused": True}
