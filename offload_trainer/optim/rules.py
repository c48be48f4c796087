"""Update rules: the hyperparameters of a step, its arithmetic in torch, and compiled kernels' constants.

native/adam.cpp declares `AdamStep` with the same fields, triton_adam.py reads them by position, and `kernels.py`
compares kernels with torch for some values of them: change all four together. A rule on whole matrices (Muon) has
`UpdateRule.matrices`: pages and the ranges of ranks are not cut inside a matrix, and all other weights follow AdamW.
"""

import ctypes
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Self

import torch

from offload_trainer.plan.shape import Weight
from offload_trainer.plan.tiered.state_formats import UpdateRule

# One cache line of fp32. torch's vectorised loop processes 8 or 16 elements at a time, depending on the CPU.
_LINE = 16

# The values of `enum Type` in adam.cpp.
TYPES = {None: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 4}

# What a run of the command uses: updates are as large as AdamW's, so its rate and weight decay can be kept.
MUON_SETTINGS: Mapping[str, Any] = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}


def fields_of(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Return fields of one type, for a `ctypes.Structure`."""
    return tuple((name, kind) for name in names)


class AdamStep(ctypes.Structure):
    """The constants of one AdamW step."""

    _fields_ = (
        *fields_of(ctypes.c_float, "scale", "keep", "lerp"),
        ("from_gradient", ctypes.c_int32),
        *fields_of(ctypes.c_float, "beta2", "rest2", "root_correction", "eps", "minus_step_size"),
    )


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as torch.optim.AdamW defines it (Loshchilov and Hutter 2019)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float  # each weight is multiplied by 1 - lr * decay

    def update(self, master: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, *, step: int) -> None:
        """Apply step number `step` in place to fp32 tensors of equal length, by torch's fused AdamW.

        torch updates elements that fill no vector in a scalar loop that rounds exp_avg_sq differently. Tensors with
        such elements are padded, so that results do not depend on where pages are cut.
        """
        tensors, n = [master, grad, *moments], master.numel()
        padded = [torch.nn.functional.pad(tensor, (0, -n % _LINE)) for tensor in tensors] if n % _LINE else tensors
        weight, slope, exp_avg, exp_avg_sq = ([tensor] for tensor in padded)
        torch._fused_adamw_(
            weight,
            slope,
            exp_avg,
            exp_avg_sq,
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
        if padded is not tensors:
            for tensor, result in zip((master, *moments), (padded[0], *padded[2:]), strict=True):
                tensor.copy_(result[:n])


@dataclass(frozen=True)
class Lerp:
    """torch's start + weight * (end - start), which is computed from the end that is nearer."""

    factor: float  # the weight if that is below 1/2, else the weight minus 1, in fp32
    from_end: bool

    @classmethod
    def of(cls, weight: float) -> Self:
        rounded = to_fp32(weight)
        return cls(rounded, from_end=False) if rounded < 0.5 else cls(to_fp32(rounded - 1), from_end=True)

    def __call__(self, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Return the result for fp32 tensors, rounded twice: the difference, and the whole."""
        way = (end - start).double()
        return torch.add((end if self.from_end else start).double(), way, alpha=self.factor).float()


@dataclass(frozen=True)
class Muon:
    """The hyperparameters of one matrix in one step."""

    lr: float
    momentum: float
    decay: float  # the matrix is multiplied by 1 - lr * decay
    adjust: Literal["original", "match_rms_adamw"]
    shape: tuple[int, int]

    @property
    def adjusted_lr(self) -> float:
        """Return the rate of this shape, as torch.optim.Muon's `adjust_lr_fn` defines it."""
        rows, columns = self.shape
        ratio = max(1, rows / columns) ** 0.5 if self.adjust == "original" else 0.2 * max(rows, columns) ** 0.5
        return self.lr * ratio

    @property
    def keep(self) -> float:
        return 1 - self.lr * self.decay

    @property
    def lerps(self) -> tuple[Lerp, Lerp]:
        """Return the lerp from the momentum to the gradient, and the one from the gradient to the new momentum."""
        return Lerp.of(1 - self.momentum), Lerp.of(self.momentum)


Hyper = AdamW | Muon


def to_fp32(value: float) -> float:
    """Round a constant as torch's fp32 kernels do."""
    return ctypes.c_float(value).value


@functools.lru_cache(maxsize=64)
def step_constants(hyper: AdamW, *, scale: float, step: int) -> AdamStep:
    """Return the constants of a step, as torch computes them: in double precision, then rounded to nearest even."""
    beta1, beta2 = hyper.betas
    lerp = Lerp.of(1 - beta1)  # the interpolation from exp_avg to the gradient
    # torch's fused kernel is compiled with fused multiply-add, so lr * decay is not rounded before the subtraction. The
    # two differ where the product is close to 1.
    keep = 1 - hyper.lr * hyper.decay
    if math.isfinite(hyper.lr) and math.isfinite(hyper.decay):
        keep = float(1 - Fraction(hyper.lr) * Fraction(hyper.decay))
    factors = lerp.factor, lerp.from_end, beta2, 1 - beta2
    root_correction, minus_step_size = (1 - beta2**step) ** 0.5, -(hyper.lr / (1 - beta1**step))
    return AdamStep(scale, keep, *factors, root_correction, hyper.eps, minus_step_size)


def adamw_of(group: Mapping[str, Any]) -> AdamW:
    """Return the hyperparameters of a torch parameter group, with Muon those of its weights that follow AdamW."""
    betas = float(group["betas"][0]), float(group["betas"][1])
    return AdamW(float(group["lr"]), betas, float(group["eps"]), float(group["weight_decay"]))


def hypers_of(rule: UpdateRule, group: Mapping[str, Any], weights: Iterable[Weight]) -> dict[str, Hyper]:
    others = adamw_of(group)

    def hyper(weight: Weight) -> Hyper:
        if not rule.matrices or weight.matrix is None:
            return others
        return Muon(others.lr, float(group["momentum"]), others.decay, group["adjust_lr_fn"], weight.matrix)

    return {weight.name: hyper(weight) for weight in weights}
