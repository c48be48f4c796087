"""Step constants and type codes that are passed to the compiled kernels for CPU and GPU.

native/adam.cpp and adam.cu declare the same structures with the same fields; change all three together.
"""

from __future__ import annotations

import ctypes
import functools
import math
from fractions import Fraction

import torch

from offload_trainer.optim.rules import AdamW, Hyper, Lion

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


@functools.lru_cache(maxsize=64)
def step_constants(hyper: Hyper, *, scale: float, step: int) -> Step:
    """Return the step's constants as torch computes them: in double precision, then rounded to nearest even."""
    if isinstance(hyper, AdamW):
        return Step(adam=_adam(hyper, scale=scale, step=step))
    return Step(lion=_lion(hyper, scale=scale))


def _adam(hyper: AdamW, *, scale: float, step: int) -> AdamStep:
    beta1, beta2 = hyper.betas
    rest1 = ctypes.c_float(1 - beta1).value
    from_gradient = abs(rest1) >= 0.5  # torch's lerp starts from the nearer end
    return AdamStep(
        scale,
        _decay_factor(hyper),
        rest1 - 1 if from_gradient else rest1,
        from_gradient,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        hyper.eps,
        -(hyper.lr / (1 - beta1**step)),
    )


def _decay_factor(hyper: AdamW) -> float:
    """Return 1 - lr * weight_decay, rounded once.

    torch's fused kernel is compiled with fused multiply-add, so the product is not rounded before the subtraction. The
    two differ where the product is close to 1.
    """
    if not (math.isfinite(hyper.lr) and math.isfinite(hyper.decay)):
        return 1 - hyper.lr * hyper.decay
    return float(1 - Fraction(hyper.lr) * Fraction(hyper.decay))


def _lion(hyper: Lion, *, scale: float) -> LionStep:
    beta1, beta2 = hyper.betas
    return LionStep(scale, 1 - hyper.lr * hyper.decay, beta1, 1 - beta1, beta2, 1 - beta2, hyper.lr)
