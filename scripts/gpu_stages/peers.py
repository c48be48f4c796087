"""Other libraries' ways to train with little GPU memory, driven by this package's loop with the same rows, clock and
loss.

    native   forward and backward of plain torch, which discards the gradients: the minimum that every engine needs
    fsdp2    torch's fully_shard with CPUOffloadPolicy on one rank: fp32 masters, moments and AdamW in host memory
    torchao  CPUOffloadOptimizer: weights on the GPU, AdamW on a copy of them in host memory

Stock DeepSpeed is an engine of the package (`--engine deepspeed`) and needs nothing here. Where it is not installed,
the record leaves it out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

SETTINGS = {
    "native": "torch alone; weights and gradients in 16 bit on the GPU, no optimizer",
    "torchao": "CPUOffloadOptimizer(parameters, torch.optim.AdamW, fused=True) on weights in bf16: the update is in "
    "bf16 too, without fp32 masters, 6 bytes a parameter in host memory where ours has 12; no clipping, since the "
    "gradients have been copied to host memory by the end of the backward",
    "fsdp2": "fully_shard of each block and of the rest, CPUOffloadPolicy(pin_memory=True), MixedPrecisionPolicy("
    "param_dtype=bf16, reduce_dtype=fp32), torch.optim.AdamW(fused=True) on fp32 CPU parameters, clip_grad_norm_",
}


def builder(peer: str | None) -> Callable[..., Any]:
    """Return the function that builds this peer's engine, or the package's own without a peer."""
    from bench_step import native_engine

    from offload_trainer.run.build import build_engine

    if peer is None:
        return build_engine
    if peer == "native":
        return lambda setup, **_: native_engine(setup)
    rival = {"fsdp2": Fsdp2, "torchao": TorchAO}[peer]
    return lambda setup, **_: rival(setup.planned.source, setup.planned.config)


def _groups(module: Any, source: Any, optim: Any) -> list[dict[str, Any]]:
    """Return AdamW's two parameter groups, with weight decay and without."""
    from offload_trainer.plan.shape import decay_groups

    weights = dict(module.model.named_parameters())
    decayed, plain = decay_groups(source.shape.weights)
    return [
        {"params": [weights[weight.name] for weight in some], "weight_decay": decay}
        for some, decay in ((decayed, optim.weight_decay), (plain, 0.0))
        if some
    ]


class _Rival:
    """A training step as the libraries' documentation shows it; subclasses supply the module and the optimizer."""

    rank, world = 0, 1
    _device: Any
    _module: Any
    _adam: Any
    _clip: float | None = None  # None: gradients are neither measured nor clipped

    def _begin(self, *, last: bool) -> None:
        """Prepare for a micro-batch, the `last` of its step or not."""

    def train_step(self, batches: Sequence[Any], *, lr: float, clock: Any) -> Any:
        import torch

        from offload_trainer.engine.protocol import StepResult

        losses = []
        for number, batch in enumerate(batches, 1):
            self._begin(last=number == len(batches))
            with clock.phase("forward"):
                loss = self._module(*batch.arguments(self._device, training=True))
                losses.append(loss.detach())
            with clock.phase("backward"):
                (loss / len(batches)).backward()
        norm = None
        with clock.phase("update"):
            if self._clip:
                norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._clip)
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            self._adam.zero_grad()
        if norm is not None:  # FSDP2's norm is sharded
            norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        mean = float(torch.stack(losses).mean())
        return StepResult(loss=mean, grad_norm=norm, loss_scale=1.0, skipped=False)


class TorchAO(_Rival):
    """torchao's CPUOffloadOptimizer over weights on the GPU, used as its documentation shows."""

    def __init__(self, source: Any, config: Any) -> None:
        import torch
        from torchao.optim import CPUOffloadOptimizer

        from offload_trainer.model.pretrained import as_parameter
        from offload_trainer.storage.tensorfile import DTYPES

        dtype = DTYPES[config.model.dtype]
        self._device = torch.device("cuda")
        self._module = source.build(dtype=dtype)
        for name, value in source.weights():
            self._module.model.get_parameter(name).data.copy_(as_parameter(value, dtype))
        self._module.to(self._device).train()
        optim = config.optim
        how = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "fused": True}
        self._adam = CPUOffloadOptimizer(_groups(self._module, source, optim), torch.optim.AdamW, **how)

    def close(self) -> None:
        self._adam = self._module = None


class Fsdp2(_Rival):
    """FSDP2 on one rank, with parameters, gradients and moments in host memory."""

    def __init__(self, source: Any, config: Any) -> None:
        import torch
        import torch.distributed as dist

        from offload_trainer.storage.tensorfile import DTYPES

        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for library in ("NCCL", "GLOO"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # the machine may have no other interface
        # gloo reduces the norms of gradients in host memory.
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self._module = source.build(dtype=torch.float32)
        weights = dict(self._module.model.named_parameters())
        for name, value in source.weights():
            weights[name].data.copy_(value)
        self._shard(source, DTYPES[config.model.dtype])
        self._module.train()
        optim = config.optim
        how = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "fused": True}
        self._adam = torch.optim.AdamW(_groups(self._module, source, optim), **how)
        self._clip = optim.max_grad_norm

    def _shard(self, source: Any, dtype: Any) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        from offload_trainer.model.shape import block_names

        on_gpu = self._device.type == "cuda"
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(self._device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=True) if on_gpu else OffloadPolicy(),
        }
        for name in block_names(self._module.model):
            fully_shard(self._module.model.get_submodule(name), **settings)
        fully_shard(self._module, **settings)

    def _begin(self, *, last: bool) -> None:
        self._module.set_requires_gradient_sync(last)

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
