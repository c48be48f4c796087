"""Tests of masters stored as rounding remainders: every master is restored, and updates have the bits
of fp32 masters.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated import EmulatedGpu
from update_ranges import ADAMW, FORMATS, by_rule, form, part

from offload_trainer.optim.cuda_adam import CudaKernel
from offload_trainer.optim.kernel_api import Kernel, ParamRange, RoundingNoise
from offload_trainer.optim.kernels import random_page
from offload_trainer.optim.moments import Noise
from offload_trainer.optim.native_adam import NativeKernel
from offload_trainer.optim.rules import AdamW
from offload_trainer.optim.split_masters import join, read_masters, split, with_remainders
from offload_trainer.optim.torch_adam import TorchKernel

# Upper halves of both signs: 0, the smallest and largest subnormal, even and odd, around a carry into the exponent,
# values that round to infinity, infinity and quiet NaN.
UPPERS = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x42FF, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF]
NATIVE_OR_TORCH = [TorchKernel, NativeKernel]


def masters(words: torch.Tensor) -> torch.Tensor:
    """Return fp32 numbers with these bits (int64, each below 2^32)."""
    return words.to(torch.int32).view(torch.float32)


def of_uppers() -> torch.Tensor:
    """Return every lower half with each of `UPPERS`, ordered by lower half, so that a block has one or two of those."""
    uppers = torch.tensor([sign | upper for upper in UPPERS for sign in (0, 0x8000)])
    return masters((torch.arange(2**16)[:, None] | uppers[None, :] << 16).reshape(-1))


def split_up(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = master.numel()
    weights, remainders = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    ties = torch.empty(-(-n // 256), dtype=torch.int16)
    split(master, weights, remainders, ties)
    return weights, remainders, ties


def joined(master: torch.Tensor) -> torch.Tensor:
    back = torch.full_like(master, 0.5)
    join(*split_up(master), back)
    return back


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def quiet(master: torch.Tensor) -> torch.Tensor:
    """Return the bits of masters after any arithmetic, which makes signalling NaN quiet."""
    return torch.where(master.isnan(), bits(master) | 0x400000, bits(master))


def kept_by(kernel: Kernel, master: torch.Tensor) -> bool:
    """Return True if an update with rate 0 keeps both halves of these masters; NaN must be quiet."""
    format, n = replace(form("fp32"), remainders=True), master.numel()
    fields, weights = with_remainders(
        {"master": master, "exp_avg": torch.zeros(n), "exp_avg_sq": torch.zeros(n)}, format
    )
    before = [fields["remainder"].clone(), fields["ties"].clone(), weights.clone()]
    still = AdamW(0.0, (0.9, 0.95), 1e-8, 0.0)
    grad = torch.zeros(n, dtype=torch.bfloat16)
    kernel.update_page(fields, grad, weights, [ParamRange(0, n, still, 1)], format=format, scale=1.0, noise=None)
    after = [fields["remainder"], fields["ties"], weights]
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, after, strict=True))


def test_the_weight_is_the_master_to_nearest_even() -> None:
    master = of_uppers()
    master = master[~master.isnan()]
    weights, _, _ = split_up(master)
    assert torch.equal(weights.view(torch.int16), master.bfloat16().view(torch.int16))
    assert masters(torch.tensor([0x7F7FFFFF])).bfloat16().isinf()
    assert bits(joined(masters(torch.tensor([0x7F7FFFFF])))).item() == 0x7F7FFFFF


def test_every_master_is_restored() -> None:
    master = of_uppers()
    assert torch.equal(bits(joined(master)), quiet(master))
    shuffled = master[torch.randperm(master.numel(), generator=torch.Generator().manual_seed(0))]
    assert torch.equal(bits(joined(shuffled)), quiet(shuffled))


@pytest.mark.parametrize("share", [0.004, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("n", [1, 255, 256, 70_001])
def test_ties_anywhere_in_a_block(n: int, share: float) -> None:
    """Exact ties that round down need extra storage, which takes the space of other remainders in the block."""
    random = torch.Generator().manual_seed(n)
    words = torch.randint(0, 0x7F800000, (n,), generator=random) | torch.randint(0, 2, (n,), generator=random) << 31
    tie = torch.rand(n, generator=random) < share
    up = torch.rand(n, generator=random) < 0.2
    words = torch.where(tie, words & ~0x1FFFF | 0x8000, torch.where(up, words | 0x18000, words))
    master = masters(words)
    _, _, ties = split_up(master)
    down = (words & 0x1FFFF) == 0x8000
    expected = torch.nn.functional.pad(down, (0, -n % 256)).view(-1, 256).sum(dim=1)
    assert torch.equal(ties.long(), expected)
    assert torch.equal(bits(joined(master)), bits(master))
    for kernel in (TorchKernel(), NativeKernel(), CudaKernel(EmulatedGpu(), fuses=True)):
        assert kept_by(kernel, master), kernel.name


@pytest.mark.parametrize("kind", NATIVE_OR_TORCH)
def test_kernels_keep_every_master(kind: type[Kernel]) -> None:
    assert kept_by(kind(), masters(quiet(of_uppers()).long() & 0xFFFFFFFF))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2**32, 2**28))
def test_all_masters_survive(first: int, request: pytest.FixtureRequest) -> None:
    """All 2^32 masters survive, 64 with one lower half together, in the functions and in the native kernel.

    Without --exhaustive, the test covers 2^24 around 1, and 2^24 that end with infinity and NaN, of both signs.
    """
    begin = first
    if not request.config.getoption("--exhaustive"):
        begin = first + 2**28 - 2**24
        if first >> 28 & 7 not in (3, 7):
            pytest.skip("all of them take minutes: --exhaustive")
    kernel, template = NativeKernel(), torch.arange(2**22, dtype=torch.int32).view(64, 65536).T.reshape(-1)
    for start in range(begin, first + 2**28, 2**22):
        words = template + (start - 2**32 if start >= 2**31 else start)
        master = words.view(torch.float32)
        wanted = words if (start & 0x7FFFFFFF) < 0x7F800000 else quiet(master)
        halves = split_up(master)
        back = torch.empty_like(master)
        join(*halves, back)
        assert torch.equal(bits(back), wanted)
        if wanted is words:  # numbers and infinity
            assert torch.equal(halves[0].view(torch.int16), master.bfloat16().view(torch.int16))
        assert kept_by(kernel, wanted.view(torch.float32))


@pytest.mark.parametrize("states", list(FORMATS))
def test_updates_have_the_bits_of_masters_in_fp32(states: str) -> None:
    """Each kernel gives the same weights, moments and restored masters over several steps, including ties."""
    n, format = 20_000, form(states)  # not a multiple of 256
    halves = replace(format, remainders=True)
    page, grad = random_page(n, format)
    bits(page["master"])[::100] &= ~0xFFFF
    bits(page["master"])[::100] |= 0x8000
    still = part(9_984, n, 0.0, 7)
    parts = by_rule(states, [part(256, 4096, 0.1, 7), part(4096, 9_728, 0.0, 7), still])
    parts[-1] = replace(parts[-1], hyper=replace(parts[-1].hyper, lr=0.0))  # this part restores ties
    for kernel in (TorchKernel(), NativeKernel(), CudaKernel(EmulatedGpu(), fuses=True)):
        whole = {name: tensor.clone() for name, tensor in page.items()}
        out = whole["master"].bfloat16()
        fields, weights = with_remainders({name: tensor.clone() for name, tensor in page.items()}, halves)
        assert sum(fields["ties"].tolist()) > 50
        for step in range(1, 4):
            noise = RoundingNoise(Noise(1, step), 3, 4096)
            given = grad.roll(step).clamp(-6e4, 6e4).bfloat16()
            kernel.update_page(whole, given, out, parts, format=format, scale=0.37, noise=noise)
            kernel.update_page(fields, given, weights, parts, format=halves, scale=0.37, noise=noise)
        assert torch.equal(bits(read_masters(fields, weights)), bits(whole["master"]))
        assert torch.equal(weights.view(torch.int16), out.view(torch.int16))
        assert torch.equal(out, whole["master"].bfloat16())
        for moment in set(page) - {"master"}:
            assert torch.equal(fields[moment].view(torch.uint8), whole[moment].view(torch.uint8)), moment
        assert not torch.equal(whole["master"], page["master"])


def test_bytes_per_parameter() -> None:
    assert replace(form("fp32"), remainders=True).bytes_each == pytest.approx(10.0, abs=0.01)
    assert replace(form("8bit"), remainders=True).bytes_each == pytest.approx(4.04, abs=0.01)
    assert replace(form("lion_bf16"), remainders=True).bytes_each == pytest.approx(4.0, abs=0.01)
    assert replace(form("fp32"), remainders=True).whole == form("fp32")


def test_damage_on_a_drive_stays_inside_its_block() -> None:
    """Wrong counts give wrong numbers in their own block, and no access beyond it."""
    n = 1000
    fields, weights = with_remainders(random_page(n, form("fp32"))[0], replace(form("fp32"), remainders=True))
    expected = read_masters(fields, weights)
    for count in (-1, 1, 200, 256, 257, 32767):
        broken = {name: tensor.clone() for name, tensor in fields.items()}
        broken["ties"][1] = count
        for kernel in (TorchKernel(), NativeKernel(), CudaKernel(EmulatedGpu(), fuses=True)):
            found = {name: tensor.clone() for name, tensor in broken.items()}
            out = weights.clone()
            parts = [part(0, n, 0.1, 1, hyper=replace(ADAMW, lr=0.0))]
            grad, halves = torch.zeros(n), replace(form("fp32"), remainders=True)
            kernel.update_page(found, grad, out, parts, format=halves, scale=1.0, noise=None)
            for left in (slice(0, 256), slice(512, n)):
                assert torch.equal(read_masters(found, out)[left], expected[left])
