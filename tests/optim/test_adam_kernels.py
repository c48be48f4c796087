"""Tests of AdamW on host memory: kernels have the bits of torch.optim.AdamW for every format of moments, however a unit
is cut.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from update_ranges import ADAMW, FIRST, FORMATS, MARK, form, part, torchs_adamw, update_stretch, updated

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.optim import kernel_api, kernels, native_adam
from offload_trainer.optim.kernel_api import Kernel, PageUpdate, TorchKernel
from offload_trainer.optim.kernel_cache import built
from offload_trainer.optim.kernels import random_page
from offload_trainer.optim.native_adam import NativeKernel
from offload_trainer.optim.rules import AdamW

TYPES = [torch.bfloat16, torch.float16, torch.float32]
KERNELS = [TorchKernel, NativeKernel]


def numbers(n: int, *, seed: int) -> torch.Tensor:
    """Return fp32[n] of many magnitudes, including subnormals and zeros."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=random) * torch.empty(n).uniform_(-40, 6, generator=random).exp()
    values[::97] = 0.0
    values[5::101] *= 1e-38
    return values


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("lr", "decay"), [(1e-3, 0.1), (10.0, 0.1), (3.0, 1 / 3), (0.3, 0.7)])
@pytest.mark.parametrize("kind", KERNELS)
def test_bits_of_torch_adamw(
    kind: type[Kernel], lr: float, decay: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors of decay may be close to zero."""
    monkeypatch.setattr(kernel_api, "CHUNK", 4096)
    n = 80_000  # many chunks, two of adam.cpp's pieces, and whole vectors
    grad, master = numbers(n, seed=4).clamp(-6e4, 6e4).to(dtype), numbers(n, seed=1)
    before, exp_avg, exp_avg_sq, out = grad.clone(), torch.zeros(n), torch.zeros(n), torch.empty(n).bfloat16()
    weight = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([weight], betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=decay, fused=True)
    for step in range(1, 4):
        hyper = replace(ADAMW, lr=lr * step, decay=decay)
        update_stretch(kind(), master, exp_avg, exp_avg_sq, grad, out, scale=0.37, hyper=hyper, step=step)
        optimizer.param_groups[0]["lr"] = lr * step
        weight.grad = before.float() * 0.37
        optimizer.step()
    assert same_bits(master, weight.data)
    assert same_bits(exp_avg, optimizer.state[weight]["exp_avg"])
    assert same_bits(exp_avg_sq, optimizer.state[weight]["exp_avg_sq"])
    assert same_bits(out, weight.data.bfloat16())
    assert same_bits(grad, before)


def test_native_reads_every_fp16_gradient() -> None:
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    grad = grad[grad.isfinite()]
    exp_avg = torch.zeros(grad.numel())  # it equals the gradient if beta1 = 0
    hyper = AdamW(0.0, (0.0, 0.9), 1e-8, 0.0)
    state = (torch.zeros_like(exp_avg), exp_avg, exp_avg + 1)
    update_stretch(NativeKernel(), *state, grad, None, scale=1.0, hyper=hyper, step=1)
    assert torch.equal(exp_avg, grad.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_native_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    n, places = 100_000, 16 if dtype is torch.bfloat16 else 13  # number of bits that are cut off
    anything = torch.randint(-(2**31), 2**31, (n,), generator=random).int().view(torch.float32)
    inside = torch.randn(n, generator=random) * torch.empty(n).uniform_(-18, 12, generator=random).exp()
    ties = (inside.to(dtype).float().view(torch.int32) + (1 << places - 1)).view(torch.float32)
    master = torch.cat([anything, inside, ties, torch.tensor([3.4e38, -3.4e38, 65519.0, 65520.0, float("inf"), -0.0])])
    expected = master.to(dtype)
    out = torch.empty_like(expected)
    still = AdamW(0.0, (0.9, 0.95), 1e-8, 0.0)
    zeros = [torch.zeros_like(master) for _ in range(3)]
    update_stretch(NativeKernel(), master, *zeros, out, scale=1.0, hyper=still, step=1)
    nan = expected.isnan()
    assert torch.equal(out.isnan(), nan)
    assert same_bits(out[~nan], expected[~nan])
    assert (expected.isinf() & ~nan).any()


# -- pages of several parts, in every format ---------------------------------------------------------------------------

N = 70_144  # more than one piece of adam.cpp's; a multiple of 256
PARTS = [part(256, 4096, 0.1, 7), part(4096, 4352, 0.0, 7), part(66_048, N, 0.1, 300)]


def cut(name: str, field: torch.Tensor, start: int, end: int) -> torch.Tensor:
    per = 256 if "scales" in name else 1
    return field[start // per : -(-end // per)]


def page_of(states: str, start: int = 0, end: int = N) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return elements [start, end) of a page, as a separate page."""
    fields, grad = random_page(N, form(states))
    return {name: cut(name, field, start, end) for name, field in fields.items()}, grad[start:end].clamp(-6e4, 6e4)


def all_same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(same_bits, ones, others)) and len(ones) == len(others)


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("kind", KERNELS)
def test_elements_outside_the_parts_keep_their_bits(kind: type[Kernel], states: str) -> None:
    """The promise includes 8-bit moments, which decoding and encoding would change."""
    before, grad = page_of(states)
    *fields, out = updated(kind(), (before, grad), PARTS, states=states)
    outside = torch.ones(N, dtype=torch.bool)
    for changed in PARTS:
        outside[changed.start : changed.end] = False
    assert (out[outside] == MARK).all()
    assert (out[~outside] != MARK).all()
    for (name, old), tensor in zip(before.items(), fields, strict=True):
        left = outside[::256] if "scales" in name else outside
        assert torch.equal(tensor[left], old[left])
        assert (tensor[~left] != old[~left]).float().mean() > 0.1, name
    unchanged = updated(kind(), (before, grad), [], states=states)
    assert all_same(unchanged, [*before.values(), torch.full_like(out, MARK)])


@pytest.mark.parametrize("states", FORMATS)
def test_a_page_is_decoded_updated_and_encoded(states: str) -> None:
    whole, page = part(0, N, 0.1, 7), page_of(states)
    assert all_same(updated(TorchKernel(), page, [whole], states=states), torchs_adamw(page, whole, states=states))


@pytest.mark.parametrize("wanted", [*TYPES, None])
@pytest.mark.parametrize("given", TYPES)
@pytest.mark.parametrize("states", FORMATS)
def test_native_has_the_bits_of_torch(states: str, given: torch.dtype, wanted: torch.dtype | None) -> None:
    page, words = page_of(states), {"states": states, "given": given, "wanted": wanted}
    assert all_same(*(updated(kind(), page, PARTS, **words) for kind in KERNELS))


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("kind", KERNELS)
def test_bits_do_not_depend_on_where_a_unit_is_cut(kind: type[Kernel], states: str) -> None:
    names = [*page_of(states)[0], "out"]
    whole = updated(kind(), page_of(states), [part(0, N, 0.1, 7)], states=states)
    for start, end in ((0, 256), (256, 69_888), (69_888, N)):
        parts = [part(0, end - start, 0.1, 7)]
        page = updated(kind(), page_of(states, start, end), parts, states=states, first=FIRST + start)
        assert all_same(page, [cut(name, field, start, end) for name, field in zip(names, whole, strict=True)])


# -- choice of kernel --------------------------------------------------------------------------------------------------


def test_auto_names_the_chosen_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, words = kernels.choose_kernel("auto")
    assert kernel.name == "native"
    assert "native" in words
    assert kernels.choose_kernel("native")[0] is kernel  # checked once in a process
    kernels._checked_native.cache_clear()
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernel, words = kernels.choose_kernel("auto")
    assert kernel.name == "torch"
    assert "no-such-compiler" in words
    with pytest.raises(UserError, match="no-such-compiler"):
        kernels.choose_kernel("native")


def test_a_failed_build_shows_the_compilers_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "adam.cpp"
    source.write_text('#error "not today"\n')
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path))
    monkeypatch.setattr(native_adam, "SOURCE", source)
    with pytest.raises(TrainerError, match="not today"):
        NativeKernel()


def test_a_changed_header_builds_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "cache"))
    source, header = tmp_path / "adam.cpp", tmp_path / "formats.h"
    source.write_text('#include "formats.h"\nextern "C" int answer() { return ANSWER; }\n')
    for answer in (42, 43):
        header.write_text(f"#define ANSWER {answer}\n")
        assert ctypes.CDLL(str(built(source, flags=("-shared", "-fPIC")))).answer() == answer


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_a_kernel_that_is_off_by_one_bit_is_not_used(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(NativeKernel):
        def update_page(self, page: PageUpdate) -> None:
            super().update_page(page)
            if page.format == form(states):
                page.fields["exp_avg_sq"].view(torch.uint8)[-1] ^= 1

    monkeypatch.setattr(kernels, "NativeKernel", Off)
    kernel, words = kernels.choose_kernel("auto")
    assert kernel.name == "torch"
    assert "last bits" in words


@pytest.mark.slow
def test_two_processes_may_build_concurrently(tmp_path: Path) -> None:
    code = "from offload_trainer.optim.native_adam import NativeLibrary; NativeLibrary()"
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OFFLOAD_TRAINER_CACHE": str(tmp_path)})
        for _ in range(2)
    ]
    assert [process.wait(300) for process in both] == [0, 0]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["adam.so", "adam.so.sha256", "turn"]
