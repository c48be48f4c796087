"""AdamW on the CPU as each engine does it, ready to be timed: from a 16-bit gradient to a 16-bit weight.

Each takes a number of parameters and returns what carries out one step on them; the buffers are made before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from offload_trainer.engine.kernels import is_built, load_cpu_adam
from offload_trainer.errors import UserError
from offload_trainer.tiers.adam import Adam, Kernel, update_stretch
from offload_trainer.tiers.kernels import choose_kernel
from offload_trainer.tiers.memory import host_buffer

ADAM = Adam(betas=(0.9, 0.95), eps=1e-8)
UPDATE_BYTES = 2 + 3 * 4 + 3 * 4 + 2  # read gradient, master, moments; write master, moments, weight
_LR, _DECAY, _SCALE = 1e-4, 0.1, 0.7

Step = Callable[[int], None]  # called with the step's number, from 1


@dataclass(frozen=True)
class Buffers:
    """The tensors of one weight, 1-D: fp32 master and moments, bf16 gradient and new weight."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    out: torch.Tensor


def make_buffers(elements: int) -> Buffers:
    """Ordinary values in memory as the trainer has it."""
    wide = [host_buffer(4 * elements).view(torch.float32) for _ in range(3)]
    narrow = [host_buffer(2 * elements).view(torch.bfloat16) for _ in range(2)]
    for tensor in (*wide, narrow[0]):
        tensor.normal_(std=0.02)
    wide[2].square_()
    return Buffers(*wide, *narrow)


def kernel_update(kernel: Kernel, b: Buffers) -> Step:
    """One of the tiered engine's kernels."""

    def update(step: int) -> None:
        state = (b.master, b.exp_avg, b.exp_avg_sq, b.grad, b.out)
        update_stretch(kernel, *state, scale=_SCALE, lr=_LR, decay=_DECAY, step=step)

    return update


def available_updates(*, say: Callable[[str], None]) -> list[tuple[str, Callable[[int], Step]]]:
    """Names, and what makes each update: our kernels, and DeepSpeed's step where its kernel is built already."""
    found: list[tuple[str, Callable[[int], Step]]] = []
    for name in ("native", "torch"):
        try:
            kernel, _ = choose_kernel(name, ADAM)
        except UserError as error:
            say(f"bench: {name} kernel left out: {error}")
            continue
        found.append((name, partial(_with_buffers, partial(kernel_update, kernel))))
    if is_built("cpu_adam"):
        load_cpu_adam()
        found.append(("deepspeed", partial(_with_buffers, partial(stock_update, gradient=False))))
    return found


def _with_buffers(make: Callable[[Buffers], Step], elements: int) -> Step:
    return make(make_buffers(elements))


def stock_update(b: Buffers, *, gradient: bool = True) -> Step:
    """What DeepSpeed's ZeRO-Offload does between a 16-bit gradient and a 16-bit weight, operation by operation.

    Without `gradient` what is left for its step, since its hooks make the fp32 gradients before: the norm as well.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(b.master)
    optimizer = DeepSpeedCPUAdam([parameter], lr=_LR, betas=ADAM.betas, eps=ADAM.eps, weight_decay=_DECAY)
    optimizer.state[parameter] = {"step": 0, "exp_avg": b.exp_avg, "exp_avg_sq": b.exp_avg_sq}
    made_before = b.grad.float()

    def update(step: int) -> None:
        if gradient:
            parameter.grad = b.grad.float()
            parameter.grad.mul_(_SCALE)
        else:
            parameter.grad = made_before
            torch.linalg.vector_norm(made_before)
            made_before.mul_(1.0)  # clipping; the same values each time
        optimizer.step()
        b.out.copy_(parameter.data)
        parameter.grad = None

    return update
