"""Tests of updating a page in one call: every kernel has torch's bits for parts with different settings and every
moment format.
"""

from __future__ import annotations

import pytest
import torch
from update_ranges import ADAMW, FORMATS, form, part

from offload_trainer.optim import moments as moments_
from offload_trainer.optim.kernel_api import Kernel, PageUpdate, ParamRange, TorchKernel
from offload_trainer.optim.kernels import random_page
from offload_trainer.optim.moments import Noise
from offload_trainer.optim.native_adam import NativeKernel

N = 70_144  # more than one piece of adam.cpp's; a multiple of 256
PARTS = [part(256, 4096, 0.1, 7), part(4096, 4352, 0.0, 7), part(66_048, N, 0.1, 300)]
NOISE, UNIT, FIRST = Noise(1, 2), 3, 4096
KERNELS = [TorchKernel, NativeKernel]
MARK = 61440.0  # larger than any weight, and exact in 16 bits
STATES = list(FORMATS)

Page = tuple[dict[str, torch.Tensor], torch.Tensor]  # fields, new weights


def cut(name: str, field: torch.Tensor, start: int, end: int) -> torch.Tensor:
    per = 256 if "scales" in name else 1
    return field[start // per : -(-end // per)]


def updated(
    kernel: Kernel,
    parts: list[ParamRange],
    *,
    states: str,
    start: int = 0,
    end: int = N,
    given: torch.dtype = torch.bfloat16,
    wanted: torch.dtype | None = torch.bfloat16,
) -> Page:
    """Return elements [start, end) of a page, updated as a separate page."""
    fields, grad = random_page(N, form(states))
    here = {name: cut(name, tensor, start, end).clone() for name, tensor in fields.items()}
    out = torch.full((end - start,), MARK, dtype=wanted or torch.bfloat16)
    gradient, new = grad.clamp(-6e4, 6e4).to(given)[start:end], None if wanted is None else out
    noise = None if states == "fp32" else NOISE
    kernel.update_page(PageUpdate(here, gradient, new, parts, form(states), 0.37, noise, UNIT, FIRST + start))
    return here, out


def same(one: Page, other: Page) -> bool:
    tensors = ((*fields.values(), out) for fields, out in (one, other))
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*tensors, strict=True))


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("kind", KERNELS)
def test_elements_outside_the_parts_keep_their_bits(kind: type[Kernel], states: str) -> None:
    """The promise includes 8-bit moments, which decoding and encoding would change."""
    before, _ = random_page(N, form(states))
    fields, out = updated(kind(), PARTS, states=states)
    outside = torch.ones(N, dtype=torch.bool)
    for changed in PARTS:
        outside[changed.start : changed.end] = False
    assert (out[outside] == MARK).all()
    assert (out[~outside] != MARK).all()
    for name, tensor in fields.items():
        left = outside[::256] if "scales" in name else outside
        assert torch.equal(tensor[left], before[name][left])
        assert (tensor[~left] != before[name][~left]).float().mean() > 0.1, name
    unchanged = updated(kind(), [], states=states)
    assert same(unchanged, (before, torch.full_like(out, MARK)))


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_a_page_is_decoded_updated_and_encoded(states: str) -> None:
    """The reference composes the functions of moments.py with torch's AdamW."""
    whole = part(0, N, 0.1, 7)
    (fields, out), (before, grad) = updated(TorchKernel(), [whole], states=states), random_page(N, form(states))
    weight = torch.nn.Parameter(before["master"].clone())
    optimizer = torch.optim.AdamW([weight], lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=0.1, fused=True)
    wide = {kind: torch.empty(N) for kind in ("exp_avg", "exp_avg_sq")}
    for kind, values in wide.items():
        if states == "8bit":
            moments_.decode_8bit(before[kind], before[f"{kind}_scales"], values, signed=kind == "exp_avg")
        else:
            values.copy_(before[kind])
    optimizer.state[weight] = {"step": torch.tensor(float(whole.step - 1)), **wide}
    weight.grad = grad.clamp(-6e4, 6e4).bfloat16().float() * 0.37
    optimizer.step()
    expected = {"master": weight.data}
    for kind, values in wide.items():
        expected[kind], noise = torch.empty_like(before[kind]), NOISE.bits(kind, UNIT, FIRST)
        if states == "fp32":
            expected[kind] = values
        elif states == "bf16":
            moments_.encode_bf16(values, expected[kind], noise=noise)
        else:
            scales = expected[f"{kind}_scales"] = torch.empty(N // 256)
            signed = kind == "exp_avg"
            moments_.encode_8bit(values, expected[kind], scales, signed=signed, noise=None if signed else noise)
    assert same((fields, out), ({name: expected[name] for name in fields}, weight.data.bfloat16()))


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32, None])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("states", STATES)
def test_native_has_the_bits_of_torch(states: str, given: torch.dtype, wanted: torch.dtype | None) -> None:
    one, other = (updated(kind(), PARTS, states=states, given=given, wanted=wanted) for kind in KERNELS)
    assert same(one, other)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("kind", KERNELS)
def test_bits_do_not_depend_on_where_a_unit_is_cut(kind: type[Kernel], states: str) -> None:
    kernel, alike = kind(), (0.1, 7)
    fields, out = updated(kernel, [part(0, N, *alike)], states=states)
    for start, end in ((0, 256), (256, 69_888), (69_888, N)):
        page = updated(kernel, [part(0, end - start, *alike)], states=states, start=start, end=end)
        whole = {name: cut(name, tensor, start, end) for name, tensor in fields.items()}
        assert same(page, (whole, out[start:end]))
