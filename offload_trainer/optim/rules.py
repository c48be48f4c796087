"""Update rules (AdamW, Lion): the hyperparameters of one step, and the constants that compiled kernels take for them.

A rule is described in four places: its state in `plan/tiered/state_formats.py` (`UpdateRule`), its hyperparameters and
step constants here, its arithmetic in `TorchKernel` and in native/adam.cpp and adam.cu, and the numbers that those are
compared with in `kernels.py`. native/adam.cpp and adam.cu declare the structures below with the same fields; change all
three together.

Both rules update each element by itself, and a page may begin and end anywhere in a matrix. A rule on whole matrices
(Muon) needs two things more: pages that are cut between matrices, which `UpdateRule` would ask of the page layout
(`plan/tiered/layout.py`), and the shape of its matrix in each `ParamRange` (`kernel_api.py`).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch

from offload_trainer.plan.tiered.state_formats import ADAMW, LION, UpdateRule

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

    def constants(self, *, scale: float, step: int) -> Step:
        """Return the constants of a step with gradients multiplied by `scale`, which do not depend on its number."""
        beta1, beta2 = self.betas
        return Step(lion=LionStep(scale, 1 - self.lr * self.decay, beta1, 1 - beta1, beta2, 1 - beta2, self.lr))


Hyper = AdamW | Lion


@functools.lru_cache(maxsize=64)
def step_constants(hyper: Hyper, *, scale: float, step: int) -> Step:
    """Return the step's constants as torch computes them: in double precision, then rounded to nearest even."""
    return hyper.constants(scale=scale, step=step)


def hyper_of(rule: UpdateRule, *, lr: float, betas: tuple[float, float], eps: float, decay: float) -> Hyper:
    """Return the hyperparameters of one step for `rule`; Lion ignores `eps`."""
    return AdamW(lr, betas, eps, decay) if rule is ADAMW else Lion(lr, betas, decay)


def hyper_of_group(rule: UpdateRule, group: Mapping[str, Any]) -> Hyper:
    """Return the current hyperparameters of a torch parameter group."""
    betas = float(group["betas"][0]), float(group["betas"][1])
    numbers = {"lr": float(group["lr"]), "eps": float(group.get("eps", 0.0)), "decay": float(group["weight_decay"])}
    return hyper_of(rule, betas=betas, **numbers)
