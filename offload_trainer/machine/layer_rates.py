"""Benchmarks of the parts of a layer that are not matrix products, and of the loss.

They cover attention, element-wise work (norms, the activation function, sums) and the loss, with forward and backward
timed separately. On a CPU with 16-bit units these take longer than the products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch.nn import functional

from offload_trainer.plan.machine import Rate, layer_key
from offload_trainer.storage.tensorfile import DTYPES

_TOKENS = {False: 1024, True: 4096}  # tokens of a row, by whether a GPU computes
_WIDTH = {False: 1024, True: 4096}
_HEAD, _VOCABULARY, _OF_LOSS = 64, 50257, 256  # head size; logits per token; tokens of the loss
VALUES = 16  # times the width: values per token that enter and leave a layer's products (`ModelShape.widths`)


def layer_rates(dtype: str, *, gpu: bool, seconds: float) -> dict[str, Rate]:
    """Return FLOP/s of attention, values/s and logits/s, by `layer_key`.

    Each of the three is timed for about `seconds`.
    """
    tokens, width = _TOKENS[gpu], _WIDTH[gpu]
    place = DTYPES[dtype], torch.device("cuda" if gpu else "cpu")
    of_layer, of_loss = f"{tokens} tokens of a layer, width {width}", f"{_OF_LOSS} tokens, {_VOCABULARY} logits each"
    operations = 4.0 * tokens * tokens * width  # forward operations; a backward takes twice as many
    parts = {
        "attention": (_attention(tokens, width, *place), (operations, 2 * operations), of_layer),
        "values": (_values(tokens, width, *place), (VALUES * tokens * width,) * 2, of_layer),
        "loss": (_loss(*place), (_OF_LOSS * _VOCABULARY,) * 2, of_loss),
    }
    rates = {}
    for part, (work, counts, what) in parts.items():
        taken = _timed(work, seconds=seconds)
        for phase, count, times in zip(("forward", "backward"), counts, taken, strict=True):
            how = f"{what}, median of {len(times)}"
            rates[layer_key(dtype, part, phase)] = Rate(count / median(times), "measured", how)
    return rates


_Work = tuple[list[torch.Tensor], Callable[[], Sequence[torch.Tensor]]]  # the inputs that get gradients, and a forward


def _attention(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> _Work:
    """Return causal attention, as models call it without padding.

    Its operations are counted for the full square of a row, as in the planner.
    """
    shape = (1, width // _HEAD, tokens, _HEAD)
    query, key, value = given = [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3)]
    return given, lambda: [functional.scaled_dot_product_attention(query, key, value, is_causal=True)]


def _values(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> _Work:
    """Return a GPT-2 layer without its products: two norms, two sums and its activation function of eight operations.

    Llama's norms, rotations and gate take about as many operations.
    """
    narrow, wide = (torch.randn(tokens, n * width, device=device).to(dtype).requires_grad_() for n in (1, 4))
    scale, shift = (torch.ones(width, device=device).to(dtype).requires_grad_() for _ in range(2))

    def forward() -> Sequence[torch.Tensor]:
        attended = narrow + functional.layer_norm(narrow, (width,), scale, shift)
        inner = 0.7978845608 * (wide + 0.044715 * torch.pow(wide, 3.0))
        active = 0.5 * wide * (1.0 + torch.tanh(inner))
        return [attended + functional.layer_norm(attended, (width,), scale, shift), active]

    return [narrow, wide, scale, shift], forward


def _loss(dtype: torch.dtype, device: torch.device) -> _Work:
    logits = torch.randn(_OF_LOSS, _VOCABULARY, device=device).to(dtype).requires_grad_()
    targets = torch.arange(_OF_LOSS, device=device)
    return [logits], lambda: [functional.cross_entropy(logits.float(), targets)]


def _timed(work: _Work, *, seconds: float) -> tuple[list[float], list[float]]:
    """Return the seconds of each forward and of each backward, without the first of each."""
    inputs, forward = work
    taken: tuple[list[float], list[float]] = ([], [])
    began, least = time.perf_counter(), 4
    while len(taken[0]) < least or time.perf_counter() - began < seconds:
        for one in inputs:
            one.grad = None
        start = _now()
        outputs = forward()
        between = _now()
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
        for times, spent in zip(taken, (between - start, _now() - between), strict=True):
            times.append(spent)
    return taken[0][1:], taken[1][1:]


def _now() -> float:
    """Return the time after all queued device work has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
