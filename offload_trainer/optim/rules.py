"""Update rules: the hyperparameters of a step, its arithmetic in torch, and compiled kernels' constants.

An elementwise rule (AdamW, Lion) has a class here, and an `UpdateRule` in `plan/tiered/state_formats.py` that describes
its state. Its name is in `config.py`. native/adam.cpp and adam.cu have a branch for it, and `kernels.py` the numbers
that kernels are compared with. Both sources declare the structures below with the same fields: change all three
together. Pages and the ranges of ranks may begin and end anywhere in a matrix.

A rule on whole matrices (Muon, `muon.py`) has `UpdateRule.matrices`. The layout then cuts neither pages nor the ranges
of ranks inside a matrix, `MatrixKernel` updates a page matrix by matrix, and all other weights follow AdamW.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch

from offload_trainer.optim.muon import Muon
from offload_trainer.plan.shape import Weight
from offload_trainer.plan.tiered.state_formats import ADAMW, LION, UpdateRule

# One cache line of fp32. torch's vectorised loop processes 8 or 16 elements at a time, depending on the CPU.
_LINE = 16

# The values of `enum Type` in adam.cpp and adam.cu.
TYPES = {None: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 4}


class AdamStep(ctypes.Structure):
    """The constants of one AdamW step."""

    _fields_ = (
        ("scale", ctypes.c_float),
        ("keep", ctypes.c_float),
        ("lerp", ctypes.c_float),
        ("from_gradient", ctypes.c_int32),
        ("beta2", ctypes.c_float),
        ("rest2", ctypes.c_float),
        ("root_correction", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("minus_step_size", ctypes.c_float),
    )


class LionStep(ctypes.Structure):
    """The constants of one Lion step."""

    _fields_ = (
        ("scale", ctypes.c_float),
        ("keep", ctypes.c_float),
        ("beta1", ctypes.c_float),
        ("rest1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("rest2", ctypes.c_float),
        ("lr", ctypes.c_float),
    )


class Step(ctypes.Union):
    """The constants of one step of either rule."""

    _fields_ = (("adam", AdamStep), ("lion", LionStep))


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as torch.optim.AdamW defines it (Loshchilov and Hutter 2019)."""

    rule: ClassVar[UpdateRule] = ADAMW
    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float  # each weight is multiplied by 1 - lr * decay

    def update(self, master: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, *, step: int) -> None:
        """Apply step number `step` in place to fp32 tensors of equal length, by torch's fused AdamW.

        If the length is not a multiple of 8 (16 with AVX-512), torch updates the last elements in a scalar loop that
        rounds exp_avg_sq differently. They are padded here, so that results do not depend on where pages are cut.
        """
        tensors = [master, *moments, grad]
        left = master.numel() % _LINE
        whole = master.numel() - left
        self._fused(*(tensor[:whole] for tensor in tensors), step=step)
        if left:
            padded = [torch.nn.functional.pad(tensor[whole:], (0, _LINE - left)) for tensor in tensors]
            self._fused(*padded, step=step)
            for tensor, result in zip(tensors, padded, strict=True):
                tensor[whole:] = result[:left]

    def _fused(
        self, master: torch.Tensor, average: torch.Tensor, square: torch.Tensor, grad: torch.Tensor, *, step: int
    ) -> None:
        torch._fused_adamw_(
            [master],
            [grad],
            [average],
            [square],
            [],
            [torch.tensor(float(step))],
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def constants(self, *, scale: float, step: int) -> Step:
        """Return the constants of step number `step` with gradients multiplied by `scale`; see `step_constants`."""
        beta1, beta2 = self.betas
        rest1 = ctypes.c_float(1 - beta1).value
        from_gradient = abs(rest1) >= 0.5  # torch's lerp starts from the nearer end
        # torch's fused kernel is compiled with fused multiply-add, so lr * decay is not rounded before the subtraction.
        # The two differ where the product is close to 1.
        keep = 1 - self.lr * self.decay
        if math.isfinite(self.lr) and math.isfinite(self.decay):
            keep = float(1 - Fraction(self.lr) * Fraction(self.decay))
        return Step(
            adam=AdamStep(
                scale,
                keep,
                rest1 - 1 if from_gradient else rest1,
                from_gradient,
                beta2,
                1 - beta2,
                (1 - beta2**step) ** 0.5,
                self.eps,
                -(self.lr / (1 - beta1**step)),
            )
        )


@dataclass(frozen=True)
class Lion:
    """Lion: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675), algorithm 2.

    With gradient g and moment m, the weight is multiplied by 1 - lr * decay and then reduced by lr times the sign of
    beta1 * m + (1 - beta1) * g. After that m becomes beta2 * m + (1 - beta2) * g. Each product and each sum is rounded
    to fp32 separately.
    """

    rule: ClassVar[UpdateRule] = LION
    lr: float
    betas: tuple[float, float]
    decay: float

    def update(self, master: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, *, step: int) -> None:
        """Apply a step in place to fp32 tensors of equal length; its number does not matter.

        `add(alpha=)` and `lerp` are avoided, because they fuse operations on some CPUs.
        """
        (exp_avg,), (beta1, beta2) = moments, self.betas
        way = exp_avg.mul(beta1).add_(grad.mul(1 - beta1)).sign_()  # the sign of NaN is 0
        master.mul_(1 - self.lr * self.decay).sub_(way.mul_(self.lr))
        exp_avg.mul_(beta2).add_(grad.mul(1 - beta2))

    def constants(self, *, scale: float, step: int) -> Step:
        """Return the constants of a step with gradients multiplied by `scale`, which do not depend on its number."""
        beta1, beta2 = self.betas
        return Step(lion=LionStep(scale, 1 - self.lr * self.decay, beta1, 1 - beta1, beta2, 1 - beta2, self.lr))


Hyper = AdamW | Lion | Muon


@functools.lru_cache(maxsize=64)
def step_constants(hyper: AdamW | Lion, *, scale: float, step: int) -> Step:
    """Return the step's constants as torch computes them: in double precision, then rounded to nearest even."""
    return hyper.constants(scale=scale, step=step)


def hyper_of(rule: UpdateRule, group: Mapping[str, Any]) -> AdamW | Lion:
    """Return the current hyperparameters of a torch parameter group, or of other settings with the same keys.

    With Muon these are the ones of weights that are not matrices of blocks.
    """
    lr, betas, decay = float(group["lr"]), (float(group["betas"][0]), float(group["betas"][1])), group["weight_decay"]
    return Lion(lr, betas, float(decay)) if rule is LION else AdamW(lr, betas, float(group["eps"]), float(decay))


def hypers_of(rule: UpdateRule, group: Mapping[str, Any], weights: Iterable[Weight]) -> dict[str, Hyper]:
    """Return the current hyperparameters of the weights of a group by name."""
    others = hyper_of(rule, group)
    found: dict[str, Hyper] = {}
    for weight in weights:
        found[weight.name] = _muon(group, weight.matrix) if rule.matrices and weight.matrix else others
    return found


def _muon(group: Mapping[str, Any], shape: tuple[int, int]) -> Muon:
    lr, decay = float(group.get("muon_lr", group["lr"])), float(group["weight_decay"])
    return Muon(lr, float(group["momentum"]), decay, group["adjust_lr_fn"], shape)
